"""Makes `strategy="dear"` and our config groups known in any Hydra application, without an import.

Hydra imports this module in every Hydra application of the environment, whether it trains anything
or not. `lightning_dear` itself imports neither torch nor Lightning, and no failure in here may end
an application that never asked for us.
"""

from __future__ import annotations

import warnings

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningDearSearchPathPlugin(SearchPathPlugin):
    """Appends our config folder, so that an application's own files of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder to `search_path`; warn and leave it alone when there is none."""
        try:
            from lightning_dear.paths import conf_dir

            folder = conf_dir()
        except Exception as error:
            _warn("its config groups are missing here", error)
            return
        search_path.append(provider="lightning-dear", path=folder.as_uri())


def _warn(consequence: str, error: Exception) -> None:
    warnings.warn(
        f"lightning-dear's Hydra plugin failed, so {consequence}: {error!r}. "
        "Reinstall or uninstall lightning-dear.",
        UserWarning,
        stacklevel=2,
    )


try:
    import lightning_dear  # noqa: F401  It registers the names of its strategies.
except Exception as error:
    _warn('strategy="dear" needs `import lightning_dear` here', error)
