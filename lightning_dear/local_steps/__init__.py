"""Local steps: ranks train alone for some steps, and exchange once (streaming DiLoCo).

Each rank trains its own *replica* as one device would: the inner half. All ranks hold the same
*anchor* of the parameters. Every few steps ranks exchange how far their replicas have moved from
the anchor (*pseudo-gradients*). The outer optimizer steps the anchor with their mean, and replicas
move towards the new anchor: the outer half. The parameters are cut into *fragments*, which are sent
at different steps, so that the link is busy all the time.

    schedule.py     the option `LocalSteps`, when a fragment is sent and merged, and what is in it
    fragment.py     one fragment: its parameters, its anchor, its messages, its outer optimizer
    rounds.py       counts an optimizer's steps, and sends and merges its fragments
    local_state.py  what each rank has of its own, in checkpoint folders
    outer_half.py   all optimizers of a module; puts the anchor into the module

Published: DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).
"""

from lightning_dear.local_steps.outer_half import OuterHalf
from lightning_dear.local_steps.schedule import LocalSteps, hiding, num_modules

__all__ = ["LocalSteps", "OuterHalf", "hiding", "num_modules"]
