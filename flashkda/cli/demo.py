# SPDX-License-Identifier: Apache-2.0
"""`flashkda demo`: flashkda.demo."""

from __future__ import annotations

import click


@click.command()
@click.option("--window", type=click.IntRange(2, 16), default=4, show_default=True, help="T, tokens of a window.")
def demo(window: int) -> int:
    """Show a model that speculates.

    Then one verify of a Kimi K3 layer: on a GPU fused is compared with the three launches to the bit; without one the
    reference runs on the CPU and the fused kernel is cross-compiled.
    """
    from flashkda.demo import main

    return main(["--window", str(window)])
