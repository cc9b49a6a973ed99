"""What `fit` is doing and what came of it: one line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from lowtide.plans.trials import table
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.engines.planned import AppliedPlan

logger = logging.getLogger("lowtide")

_ACTIONS = {"keep": "kept", "recompute": "recomputed", "host": "offloaded", "disk": "offloaded to disk"}
_ALWAYS_SHOWN = ("keep", "recompute", "host")


class Progress:
    """Say what is being done. As a context manager it takes its line off the terminal at the end.

    Where the logger "lowtide" shows INFO, each stage is a log line. Where it does not and stderr is a terminal, each
    stage overwrites the one before. A logger whose level is above WARNING silences that too. A stderr that someone has
    replaced (a notebook, a progress bar, a test) is no terminal.
    """

    def __init__(self) -> None:
        self._is_on_terminal = False

    def __call__(self, stage: str) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", stage)
        elif logger.isEnabledFor(logging.WARNING) and sys.stderr is sys.__stderr__:
            self._write(f"lowtide: {stage} ")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_on_terminal:
            self._write("")

    def _write(self, text: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._is_on_terminal = True
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def log_fitted(handle: AppliedPlan, budget_bytes: int) -> None:
    """One line on the plan that was kept, and a table of the candidates if there were several."""
    plan, peak, slowdown = handle.plan, handle.measured_peak_bytes, handle.measured_slowdown
    shown = {action: size for action, size in plan.bytes_by_action().items() if size or action in _ALWAYS_SHOWN}
    logger.info(
        "%s: %d regions, %s; peak %s predicted, %s measured, within %s; %.1f %% slower predicted, %s measured",
        "nothing to do, the step fits as it is" if plan.is_plain else "fitted",
        len(plan.regions),
        ", ".join(f"{format_bytes(size)} {_ACTIONS.get(action, 'compressed')}" for action, size in shown.items()),
        format_bytes(plan.peak_bytes),
        "not" if peak is None else format_bytes(peak),
        format_bytes(budget_bytes),
        100 * plan.slowdown,
        "not" if slowdown is None else f"{100 * slowdown:.1f} %",
    )
    if len(handle.candidates) > 1:
        logger.info("candidates:\n%s", table(handle.candidates))
