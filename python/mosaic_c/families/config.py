"""Reading a config.json without trusting it, and the values that change the arithmetic.

A value that is missing, of the wrong type, absurd, or that asks for arithmetic the engine does not
have is a MosaicError naming the key, the file, what was expected and what is there. Nothing that
changes the arithmetic is ever ignored or guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mosaic_c.errors import MosaicError
from mosaic_c.plan import ModelPlan

# Largest sizes taken seriously, well above any published model.
MAX_VOCAB, MAX_DIM, MAX_LAYERS, MAX_EXPERTS, MAX_HEADS = 1 << 24, 1 << 20, 1024, 4096, 4096
MAX_HEAD_DIM = 4096  # as in kv.c and attn.c
MAX_POSITIONS = 2**31 - 1
BLOCK = 128  # edge of an FP8 scale block


def shown(value: object) -> str:
    """A config value for a message: JSON, printable ASCII, cut when long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deep structure"
    return text if len(text) <= 160 else f"{text[:160]}..."


class Config:
    """A config section with checked access. where: the file and section, for messages."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def error(self, key: str, expected: str, got: object) -> MosaicError:
        return MosaicError(
            f"{self.where}: {shown(key)}: expected {expected}, got {shown(got)}", code="EFORMAT"
        )

    def refuse(self, key: str, supported: str, got: object) -> MosaicError:
        """The error for a value that means something this engine does not do."""
        error = self.error(key, f"{supported} (nothing else is supported yet)", got)
        error.code = "EUNSUPPORTED"
        return error

    def get(self, key: str) -> Any:
        """The value, None when absent or null."""
        return self.data.get(key)

    def need(self, key: str) -> Any:
        value = self.data.get(key)
        if value is None:
            state = "is null" if key in self.data else "is missing"
            raise MosaicError(f'{self.where}: required key "{key}" {state}', code="EFORMAT")
        return value

    def size(self, key: str, limit: int, *, default: int | None = None, least: int = 1) -> int:
        value = self.need(key) if default is None else self.get(key)
        if value is None:
            assert default is not None
            return default
        if type(value) is not int or not least <= value <= limit:
            raise self.error(key, f"an integer from {least} to {limit}", value)
        return value

    def real(self, key: str, least: float, limit: float) -> float:
        return checked_real(self, key, self.need(key), least, limit)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "true or false", value)
        return value

    def only(self, key: str, supported: object) -> None:
        """Refuses any value but this one; absent and null are taken as it."""
        value = self.get(key)
        if value is not None and (type(value) is not type(supported) or value != supported):
            raise self.refuse(key, json.dumps(supported), value)

    def section(self, key: str) -> Config:
        value = self.need(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return Config(value, f"{self.where}: {key}")


@dataclass(frozen=True)
class Family:
    """What a family file exports as FAMILY.

    model_types and architectures: the config.json values that select it. build: the plan of the
    text model described by (whole config).
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    build: Callable[[Config], ModelPlan]


def checked_real(c: Config, key: str, value: object, least: float, limit: float) -> float:
    if type(value) not in (int, float) or not least <= value <= limit:  # type: ignore[operator]
        raise c.error(key, f"a number from {least:g} to {limit:g}", value)
    return float(value)  # type: ignore[arg-type]


# ---- values that change the arithmetic -----------------------------------------------------------


def check_text(c: Config) -> None:
    """Refuses what no family here implements. transformers' FP8 experts read the last four keys."""
    c.only("hidden_act", "silu")
    c.only("use_sliding_window", False)
    for key in ("swiglu_limit", "swiglu_alpha", "mlp_gate_softcap", "mlp_up_softcap"):
        if c.get(key) is not None:
            raise c.refuse(key, "none", c.get(key))


def check_layer_types(c: Config, layers: int, allowed: tuple[str, ...]) -> list[str] | None:
    """layer_types, one of the allowed words per layer; None when the config has no such key."""
    types = c.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        got = f"{len(types)} entries" if isinstance(types, list) else types
        raise c.error("layer_types", f"a list of num_hidden_layers = {layers} entries", got)
    for i, kind in enumerate(types):
        if kind not in allowed:
            raise c.refuse(f"layer_types[{i}]", " or ".join(json.dumps(x) for x in allowed), kind)
    return types


def weight_block(top: Config, text: Config) -> int | None:
    """Edge of the FP8 scale blocks, None for a checkpoint that is not quantised.

    Which tensors are quantised is never read from the config: a tensor is iff its scale exists.
    """
    found = []
    for c in (top,) if text is top else (top, text):
        if c.get("compression_config") is not None:
            raise c.refuse("compression_config", 'none, or "quantization_config"', "compressed")
        if c.get("quantization_config") is not None:
            found.append(c.section("quantization_config"))
    if len(found) == 2 and found[0].data != found[1].data:
        raise top.error("quantization_config", "the same as in text_config", "two that differ")
    if not found:
        return None
    q = found[0]
    if q.need("quant_method") != "fp8":
        raise q.refuse("quant_method", '"fp8"', q.get("quant_method"))
    q.only("fmt", "e4m3")
    q.only("activation_scheme", "dynamic")
    q.only("expert_dtype", "fp8")
    block = q.data.get("weight_block_size", [BLOCK, BLOCK])
    if block != [BLOCK, BLOCK] or any(type(x) is not int for x in block):
        raise q.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}]", block)
    return BLOCK


def rope(c: Config, head_dim: int, share: float | None) -> tuple[float, int]:
    """(theta, rotated dims) from either style of config: rope_parameters as transformers 5 writes
    it, or rope_theta beside rope_scaling.

    share: the part of a head that is rotated when the config names none; None for a family whose
    reference rotates whole heads whatever the config says. A theta is never assumed. mrope_section
    is accepted: for text all its axes carry the same position, which is plain rope.
    """
    sections = [c]
    for key in ("rope_parameters", "rope_scaling"):
        if c.get(key) is not None:
            sections.append(c.section(key))
    for s in sections[1:]:
        s.only("rope_type", "default")
        s.only("type", "default")
        if s.get("factor") not in (None, 1, 1.0):
            raise s.refuse("factor", "1", s.get("factor"))
        for key, value in s.data.items():
            if isinstance(value, dict):
                raise s.refuse(key, "one set of values for all layers", value)
    theta = _agreed(sections, "rope_theta", 1.0, 1e15)
    if theta is None:
        raise MosaicError(
            f'{c.where}: required key "rope_theta" is missing (looked in rope_parameters, '
            "rope_scaling and at the top)",
            code="EFORMAT",
        )
    part = _agreed(sections, "partial_rotary_factor", 0.0, 1.0)
    if share is None and part not in (None, 1.0):
        raise c.refuse("partial_rotary_factor", "1", part)
    factor = part if part is not None else 1.0 if share is None else share
    dims = int(head_dim * factor)
    if dims < 2 or dims % 2:
        even = f"a share of head_dim {head_dim} that is an even number of dims"
        raise c.error("partial_rotary_factor", even, factor)
    return theta, dims


def _agreed(sections: list[Config], key: str, least: float, limit: float) -> float | None:
    """The one value of a key that several sections may give."""
    values = [(s, checked_real(s, key, s.get(key), least, limit)) for s in sections
              if s.get(key) is not None]  # fmt: skip
    for s, value in values[1:]:
        if value != values[0][1]:
            raise s.error(key, f"{values[0][1]:g} as in {values[0][0].where}", value)
    return values[0][1] if values else None


def sparse_layers(c: Config, layers: int) -> list[bool]:
    """Which layers have experts, from mlp_only_layers and decoder_sparse_step."""
    step = c.size("decoder_sparse_step", MAX_LAYERS, default=1)
    only = c.get("mlp_only_layers")
    only = [] if only is None else only
    if not isinstance(only, list) or any(type(x) is not int or x < 0 for x in only):
        raise c.error("mlp_only_layers", "a list of layer numbers", only)
    dense = set(only)  # a hostile list may be long
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]
