# SPDX-License-Identifier: Apache-2.0
"""`flashkda query`: what an architecture can do with a geometry, and every reason where it cannot."""

from __future__ import annotations

import json
from typing import Any

import click

import flashkda
from flashkda.capability import Capability, PathSupport
from flashkda.cli.options import arch_option, archs_of, geometry_of, geometry_options
from flashkda.cli.status import Status
from flashkda.cli.text import listing, table, yes
from flashkda.config import PATHS


@click.command()
@geometry_options
@arch_option
@click.option("--path", type=click.Choice(PATHS), help="Exit with 3 where this path is refused.")
@click.option("--toolchain/--no-toolchain", default=True, help="Whether packages that are missing here are reasons.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def query(archs: tuple[str, ...], path: str | None, toolchain: bool, as_json: bool, **values: Any) -> int:
    """Tell what can run a geometry.

    Path by path, with every reason against each.

    The default architecture is this machine's. Needs no GPU.

    \b
    flashkda query --preset kimi-k3 --tp 8 --window 4 --arch sm_90a,sm_80
    flashkda query --heads 12 --window 4 --state-dtype bfloat16 --path fused
    """
    geometry = geometry_of(values)
    found = [flashkda.query(geometry, arch, toolchain=toolchain) for arch in archs_of(archs) or ["auto"]]
    if as_json:
        capabilities = [_to_dict(capability) for capability in found]
        click.echo(json.dumps({"geometry": geometry.to_dict(), "architectures": capabilities}, indent=1))
    else:
        click.echo(_to_text(found))
    refused = path is not None and not all(capability.support(path).supported for capability in found)
    return Status.REFUSED if refused else Status.OK


def _supports(capability: Capability) -> list[PathSupport]:
    return [capability.support(path) for path in PATHS]


def _to_dict(capability: Capability) -> dict[str, Any]:
    paths = {
        support.path: {
            "supported": support.supported,
            "measured": support.measured,
            "reasons": [reason.to_dict() for reason in support.reasons],
        }
        for support in _supports(capability)
    }
    return {"arch": capability.arch, "paths": paths}


def _to_text(found: list[Capability]) -> str:
    rows = [
        (capability.arch, support.path, yes(support.supported), yes(support.measured))
        for capability in found
        for support in _supports(capability)
    ]
    parts = [str(found[0].geometry), table(("arch", "path", "supported", "measured"), rows)]
    for capability in found:
        for support in _supports(capability):
            if support.reasons:
                parts.append(f"{support.path} on {capability.arch} is refused:\n{listing(support.reasons)}")
    return "\n\n".join(parts)
