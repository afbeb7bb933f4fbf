"""Lightning's question before every batch, whether rank 0 was told to end, without a message.

From version 2.6 on Lightning broadcasts the answer on the default group before every batch, and all
ranks wait for it. When a batch starts, the link is full of all-gathers, and the answer queues
behind them: the overlap with forward would be lost. So the answer travels with the flags of the
reduce-scatters instead (`work.Signal`), and is known when the batch starts.
"""

from __future__ import annotations

from typing import Any

from lightning_dear.collectives.work import Signal

_QUESTION = "_broadcast_sigterm_tensor"


def answer_sigterm(trainer: Any, signal: Signal) -> None:
    """Lets the trainer's loop take the answer from `signal`; it asks itself where there is none.

    Undone by `ask_sigterm_again`. Does nothing where this Lightning does not ask.
    """
    loop = trainer.fit_loop.epoch_loop
    ask = getattr(loop, _QUESTION, None)
    if ask is None:
        return
    signal.ask = lambda: bool(getattr(trainer, "received_sigterm", False))

    def answer() -> None:
        heard, signal.heard = signal.heard, None
        # All ranks have heard the same; if there was a signal, Lightning does what it does then.
        if heard is not False:
            ask()

    setattr(loop, _QUESTION, answer)


def ask_sigterm_again(trainer: Any) -> None:
    """Undoes `answer_sigterm`."""
    trainer.fit_loop.epoch_loop.__dict__.pop(_QUESTION, None)
