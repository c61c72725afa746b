"""For tests of conversations: a tokenizer and a chat template like those of thinking models, and a model that is quick,
strict about where it may go back to, and fond of control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from mosaic_c.errors import MosaicError
from mosaic_c.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>")
UNMARKED = ("<think>", "</think>", "<tool_call>")
VOCAB = 200

# Earlier answers come without their thinking, trimmed; thinking is open unless it is switched off.
TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('no question') }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def write_tokenizer(folder: Path, template: str = TEMPLATE, special: bool = False) -> Tokenizer:
    """Letters and pairs of letters, so that text has several spellings; ids 190 and on are nobody's. special: the
    marks of thinking are special tokens, which give no text."""
    vocab = {c: i for i, c in enumerate(map(chr, [10, *range(32, 127)]))}
    pairs = [(a, b) for a in "aeiou \n" for b in "nrst x\n."]
    for a, b in pairs:
        if len(vocab) < 150:
            vocab.setdefault(a + b, len(vocab))
    merges = [p for p in pairs if p[0] + p[1] in vocab]
    tok = Library(models.BPE(vocab=vocab, merges=merges))
    tok.decoder = decoders.Fuse()
    tok.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    marks = [AddedToken(t, special=special, normalized=False) for t in UNMARKED]
    (tok.add_special_tokens if special else tok.add_tokens)(marks)
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


class Fake:
    """What Conversation needs of a model. The next token depends on all before; hybrid: rewind goes to snapshots only.
    script: token ids to give whatever was asked, in place of that."""

    def __init__(self, tokenizer, ctx=400, hybrid=True, chunk=16, budget=1 << 20, script=None):
        self.tokenizer, self.ctx, self.vocab, self.script = tokenizer, ctx, VOCAB, script
        self.memory = SimpleNamespace(chunk=chunk, budget=budget)
        self.plan = SimpleNamespace(delta_layers=[0] if hybrid else [])
        self.generation_config, self.config = {}, {}
        self.kept = 0  # bytes of snapshots
        self.calls: list[int] = []  # tokens of each forward call
        control = [tokenizer.token_id(t) for t in (*SPECIAL, *UNMARKED)]
        self.bias = np.zeros(VOCAB, np.float32)
        self.bias[control] = 1.2

    def session(self, load=None):
        if load is not None:
            raise MosaicError(f"{load}: not a session file", "EFORMAT")
        return FakeSession(self)

    def stats(self):
        state = {"state": self.kept}
        return SimpleNamespace(resident=state, hits=0, gpu_hits=0, misses=0, rss=1, budget=2)


class FakeSession:
    def __init__(self, model):
        self.model, self._tokens, self.snaps = model, [], set()

    @property
    def tokens(self):
        return list(self._tokens)

    @property
    def position(self):
        return len(self._tokens)

    @property
    def room(self):
        return self.model.ctx - self.position

    def forward(self, ids, last=False, *, progress=None):
        assert last and 0 < len(ids) <= self.room
        for layer in range(2):
            if progress is not None:
                progress((layer + 1) * len(ids), 2 * len(ids))
        self.model.calls.append(len(ids))
        self._tokens += ids
        if self.model.script is not None:
            logits = np.zeros(VOCAB, np.float32)
            logits[self.model.script.pop(0) if len(self.model.script) else 0] = 9
            return logits
        rng = np.random.default_rng([len(self._tokens), *self._tokens[-40:], sum(self._tokens)])
        return rng.standard_normal(VOCAB, np.float32) + self.model.bias

    @property
    def snapshots(self):
        return sorted(self.snaps)

    def snapshot(self):
        self.model.kept += 1000 * (self.position not in self.snaps)
        self.snaps.add(self.position)

    def forget(self, n):
        assert n in self.snaps
        self.snaps.remove(n)
        self.model.kept -= 1000

    def rewind(self, n):
        now = self.position
        assert 0 <= n <= now
        if n not in (0, now) and self.model.plan.delta_layers and n not in self.snaps:
            raise MosaicError(f"no snapshot at {n}", "ERANGE")
        self._tokens = self._tokens[:n]
        for at in [p for p in self.snaps if p > n]:
            self.forget(at)

    def close(self):
        self.rewind(0)
