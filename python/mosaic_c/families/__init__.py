"""Model families: config.json in, ModelPlan out. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mosaic_c.errors import MosaicError
from mosaic_c.families import qwen2_moe, qwen3_5_moe, qwen3_moe
from mosaic_c.families.config import Config, Family, shown
from mosaic_c.plan import ModelPlan

FAMILIES: tuple[Family, ...] = (
    qwen3_5_moe.FAMILY,
    qwen3_moe.FAMILY,
    qwen2_moe.FAMILY,
)


def names() -> list[str]:
    return [f.name for f in FAMILIES]


def plan_for(config: Mapping[str, Any], where: str = "config.json") -> ModelPlan:
    """The plan of the model that a config.json describes; where: its path, for messages.

    Raises MosaicError: EUNSUPPORTED for an unknown family and for values that ask for something
    that is not implemented, EFORMAT for values that are missing or malformed.
    """
    return find(config, where).build(Config(config, where))


def find(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family by model_type and architectures; both must be known where both are given.

    A known model_type with an unknown architecture is another model that shares the config class
    (a classifier, a bare encoder, remote code).
    """
    c = Config(config, where)
    model_type, architectures = c.get("model_type"), c.get("architectures")
    if model_type is None and isinstance(config.get("text_config"), Mapping):
        model_type = config["text_config"].get("model_type")
    if architectures is not None and not isinstance(architectures, list):
        raise c.error("architectures", "a list", architectures)
    for family in FAMILIES:
        known = [a for a in architectures or [] if a in family.architectures]
        if (model_type in family.model_types or model_type is None) and (
            known or (not architectures and model_type is not None)
        ):
            return family
    raise MosaicError(
        f"{where}: model_type {shown(model_type)} with architectures {shown(architectures)} is not "
        f"supported, expected one of: {supported()}",
        code="EUNSUPPORTED",
    )


def supported() -> str:
    """Every family with its architectures, for messages."""
    return "; ".join(f"{f.name} ({', '.join(f.architectures)})" for f in FAMILIES)
