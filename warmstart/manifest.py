"""What an image says about itself: the manifest and the bill of materials that lie in /opt/warmstart."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from warmstart.lock import PIP, Package
from warmstart.names import LABEL
from warmstart.plan import Plan
from warmstart.profile import BUILDER


def manifest(plan: Plan) -> dict[str, Any]:
    """Plan id, cache key, versions, ENV, cuts and inputs, for whoever looks into the image."""
    return {
        "schema": 1,
        "plan_id": plan.plan_id,
        "arch": plan.arch,
        "lane": plan.lane,
        "cache_key": plan.cache_key,
        "versions": plan.versions,
        "env": plan.env,
        "caches": plan.caches,
        "volume": msgspec.to_builtins(plan.volume),
        "serve": plan.profile.serve,
        "patches": plan.patches,
        "inputs": plan.inputs,
        "lost": plan.cuts.messages(),
        "dropped": plan.cuts.dropped,
        "compilers": plan.profile.compilers,
    }


def sbom(plan: Plan) -> dict[str, Any]:
    """Bill of materials in CycloneDX 1.6 JSON: every distribution package and wheel with its sha256."""
    components = [
        _component(
            p.name,
            p.version,
            p.sha256,
            f"pkg:deb/{_family(plan)}/{quote(p.name)}@{quote(p.version)}?arch={p.architecture}",
        )
        for p in (*plan.base.locked.packages, *_more(plan))
    ]
    for wheel in (w for w in plan.wheels if w.layer != BUILDER):
        component = _component(
            wheel.name, wheel.version, wheel.sha256, f"pkg:pypi/{quote(wheel.name)}@{quote(wheel.version)}"
        )
        if builder := plan.profile.wheels.builders.get(wheel.name):
            component["publisher"] = builder
        if wheel.source != PIP:
            component["properties"] = [{"name": f"{LABEL}index", "value": wheel.source}]
        components.append(component)
    subject = {"type": "container", "name": plan.profile.image.repository, "version": plan.plan_id}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": plan.labels["org.opencontainers.image.created"], "component": subject},
        "components": components,
    }


def _more(plan: Plan) -> list[Package]:
    """Distribution packages that layers of the image have beyond the base's."""
    every = {p.name: p for layer, packages in plan.packages.items() if layer != BUILDER for p in packages}
    return [every[name] for name in sorted(every)]


def _component(name: str, version: str, sha256: str, purl: str) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl}
    if sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return component


def _family(plan: Plan) -> str:
    return "ubuntu" if plan.base.locked.suite in {"jammy", "noble", "resolute"} else "debian"
