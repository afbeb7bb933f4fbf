"""Error messages for unknown names, and for libraries that are not installed."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

APPS = ("sklearn", "scipy", "matplotlib")
"""Top-level modules that the extra `apps` installs. All programs of this package except dear-train
need that extra."""


def is_meant(name: str, names: Iterable[str]) -> str:
    """Returns " Is '...' meant?" with the most similar of `names`; "" if none is similar.

    Args:
        name: Unknown name.
        names: Valid names.
    """
    known = list(names)
    plain = "".join(filter(str.isalnum, name.lower()))
    close = get_close_matches(name, known, n=1) or get_close_matches(plain, known, n=1)
    return f" Is {close[0]!r} meant?" if close else ""


def check_name(what: str, name: str, names: Iterable[str]) -> str:
    """Returns `name`, after checking that it is one of `names`.

    Args:
        what: Kind of thing that has the names, such as "fusion", for the message.
        name: Name to check.
        names: Valid names.

    Raises:
        ValueError: If `name` is not among them; the message lists the valid ones.
    """
    known = list(names)
    if name not in known:
        valid = ", ".join(known)
        raise ValueError(f"Unknown {what} {name!r}; valid names: {valid}.{is_meant(name, known)}")
    return name


def need(
    what: str, *modules: str, extra: str = "apps", error: type[BaseException] = ModuleNotFoundError
) -> None:
    """Raises `error` if one of `modules` is not installed. Does not import them.

    The message says how to install them.

    Args:
        what: Option or program that needs the modules, for the message.
        *modules: Top-level names of the modules.
        extra: Extra of this package that installs the modules.
        error: Class of the exception. With `SystemExit`, a program ends with the message and
            without a traceback.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        raise error(f'{what} needs {", ".join(missing)}: pip install "lightning-dear[{extra}]"')
