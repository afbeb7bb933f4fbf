"""``dear-recipe NAME``: a published claim run again: what comes out, and what must be true for it.

Nothing heavy is imported before the first line is on the screen.
"""

from __future__ import annotations

import sys

from lightning_dear.names import APPS, is_meant, need
from lightning_dear.paths import recipes_dir
from lightning_dear.studies.interrupts import INTERRUPTS

USAGE = (
    "dear-recipe NAME [measure=true] [OPTION=VALUE ...]\n\nmeasure=true measures the small siblings"
    " again, on emulated links.\nOther options are those of the recipe's config"
    " (conf/recipe/NAME.yaml; dear-recipe NAME --cfg job shows it):\n"
    "cluster=, models=, baselines=, ..."
)


def titles() -> dict[str, str]:
    """Return the recipes that there are, each with the title of its page."""
    folders = sorted(path.parent for path in recipes_dir().glob("*/make.py"))
    return {one.name: _title(one.joinpath("README.md").read_text()) for one in folders}


def _title(page: str) -> str:
    return page.partition("\n")[0].lstrip("# ")


def main() -> None:
    """``dear-recipe NAME``; without a name the names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    known = titles()
    if name not in known:
        names = "\n".join(f"  {one:<18} {title}" for one, title in known.items())
        asks = name in ("", "-h", "--help")
        unknown = "" if asks else f"Unknown recipe {name!r}.{is_meant(name, known)}\n"
        print(f"{unknown}{USAGE}\n\nNAME is one of\n{names}", file=sys.stderr if unknown else None)
        raise SystemExit(bool(unknown))
    need("dear-recipe", *APPS, error=SystemExit)
    said = f"{known[name]}: claims that were published, and what comes out here."
    print(said, file=sys.stderr, flush=True)
    with INTERRUPTS.call(_end):
        from lightning_dear.apps.recipe.run import recipe_job

        sys.argv[1:2] = [f"--config-name=recipe/{name}"]
        recipe_job()


def _end(number: int) -> None:
    print("\ndear-recipe: interrupted, and nothing is written. Start it again.", file=sys.stderr)
