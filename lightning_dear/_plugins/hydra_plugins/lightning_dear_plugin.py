"""Makes `strategy="dear"` and this package's config groups known in every Hydra application.

Hydra imports this module in all Hydra applications of the environment, also in those that do not
use this package. So it must not slow them down (`import lightning_dear` imports neither torch nor
Lightning), and a failure here must not end them: it only warns.
"""

import warnings

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningDearSearchPathPlugin(SearchPathPlugin):
    """Appends this package's config folder. An application's files of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends the folder to `search_path`. If the folder is not found, only warns."""
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
