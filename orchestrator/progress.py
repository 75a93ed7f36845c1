"""What a driver prints while it trains."""

from __future__ import annotations

from typing import Any


def progress_line(line: dict[str, Any]) -> str:
    """One line for people from a line of metrics.jsonl, or the text of a message."""
    if "message" in line:
        return str(line["message"])
    evaluated = f"  held-out loss {line['eval_loss']:.4f}" if "eval_loss" in line else ""
    return (
        f"step {line['step']:3d}  loss {line['loss']:.4f}  {line['step_time_s']:.2f} s  "
        f"{line['layout']} on {line['world_size']} workers{evaluated}"
    )
