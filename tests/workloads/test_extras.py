import pytest

from lightning_dear.workloads.extras import require


def test_a_missing_package_names_our_extra():
    with pytest.raises(ModuleNotFoundError) as caught:
        require("no_such_package.part", "vision")
    assert str(caught.value) == (
        'This job needs no_such_package: pip install "lightning-dear[vision]"'
    )


def test_a_present_module_is_returned():
    import math

    assert require("math", "text") is math
