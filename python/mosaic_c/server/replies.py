"""Answers as the protocol writes them, whole or in chunks, from the pieces of a ticket.

A Reply takes pieces and gives deltas; what was said so far is kept for the whole answer, log-probabilities as the text
that is sent: as objects they take many times as much. It keeps nothing of the request's body but what an answer needs.
It knows neither HTTP nor the scheduler.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from mosaic_c.server import tokens
from mosaic_c.server.body import dumps
from mosaic_c.server.prompts import Prepared, Prompter
from mosaic_c.server.schema import Wish
from mosaic_c.server.tools import Call

if TYPE_CHECKING:
    from mosaic_c.generation import Piece

Delta = dict[str, Any]


class Reply:
    """What both endpoints share: identity, counts, and the frame of a chunk.

    stream: whether the client wants chunks. size: what is kept of the client's text, in characters.
    """

    KIND, CHUNK, PREFIX, BODY = "", "", "", ""

    def __init__(
        self, prompter: Prompter, prepared: Prepared, wish: Wish, model: str, fingerprint: str
    ) -> None:
        self.stream, self._include_usage, self._with_logprobs = (
            wish.stream,
            wish.include_usage,
            wish.logprobs,
        )
        self._tokenizer = prompter.tokenizer
        # Without ignore_eos the first of these ends the answer, and is no part of it.
        self._ends = frozenset() if wish.ignore_eos else prompter.stop_ids
        self._prompt_tokens, self._sampling = len(prepared.ids), prepared.sampling
        self._reasoning, self._parser = prepared.reasoning, prepared.parser
        self.size = 0 if self._parser is None else self._parser.size
        self.tokens = self.reasoning_tokens = 0
        self.reused = 0
        self.identity = f"{self.PREFIX}-{uuid.uuid4().hex[:24]}"
        self._waiting: list[str] = []  # logprobs of tokens that are not out yet
        self._head = {
            "id": self.identity,
            "object": self.KIND,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        frame = dumps({**self._head, "object": self.CHUNK})[:-1]
        self._frame = f'{frame},"choices":[{{"index":0,"{self.BODY}":'
        self._usage_null = ',"usage":null' if wish.include_usage else ""

    # ---- for the endpoints ----

    def first(self) -> list[str]:
        """Chunks that come before all text."""
        return []

    def take(self, piece: Piece) -> list[Delta]:
        """Takes a piece; what it adds to the answer."""
        self.tokens += 1
        return self._take(piece)

    def push(self, piece: Piece) -> list[str]:
        """The same, as chunks to send now."""
        return [self._chunk(d) for d in self.take(piece)]

    def finish(self, reason: str | None) -> list[str]:
        """Chunks that end the answer: what was held back, the reason, usage where it was asked for."""
        chunks = [self._chunk(d) for d in self._rest()]
        chunks.append(self._chunk(self._nothing(), self._reason(reason)))
        if self._include_usage:
            last = {**self._head, "object": self.CHUNK, "choices": [], "usage": self.usage()}
            chunks.append(dumps(last))
        return chunks

    def whole(self, reason: str | None) -> str:
        """The answer as JSON."""
        self._rest()  # what was held back is of the answer
        choice = dumps({"index": 0, **self._said(), "finish_reason": self._reason(reason)})[:-1]
        logprobs = self._logprobs(self._waiting) if self._with_logprobs else "null"
        tail = dumps({"usage": self.usage(), "mosaic_c": self.notes()})[1:]
        return f'{dumps(self._head)[:-1]},"choices":[{choice},"logprobs":{logprobs}}}],{tail}'

    def usage(self) -> dict[str, Any]:
        prompt = self._prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def notes(self) -> dict[str, Any]:
        """What the protocol has no field for: the seed in use, settings that had no effect."""
        s = self._sampling
        return {"seed": None if s.greedy else s.seed, "ignored": list(s.ignored)}

    # ---- for the kinds of replies ----

    def _take(self, piece: Piece) -> list[Delta]:
        raise NotImplementedError

    def _rest(self) -> list[Delta]:
        raise NotImplementedError

    def _said(self) -> dict[str, Any]:
        raise NotImplementedError

    def _nothing(self) -> Any:
        raise NotImplementedError

    def _entry(self, piece: Piece) -> str:
        """The logprobs of one token."""
        raise NotImplementedError

    def _logprobs(self, entries: list[str]) -> str:
        """Entries as the protocol wants them together."""
        raise NotImplementedError

    def _reason(self, reason: str | None) -> str:
        return reason or "stop"

    def _note(self, piece: Piece) -> None:
        """Keeps the logprobs of a piece where they are to be shown."""
        if self._with_logprobs and piece.token not in self._ends:
            self._waiting.append(self._entry(piece))

    def _chunk(self, delta: Any, reason: str | None = None) -> str:
        logprobs = "null"
        if self._waiting:
            logprobs = self._logprobs(self._waiting)
            self._waiting = []
        end = "null" if reason is None else f'"{reason}"'
        extra = "" if reason is None else f',"mosaic_c":{dumps(self.notes())}'
        return f'{self._frame}{dumps(delta)},"logprobs":{logprobs},"finish_reason":{end}}}]{self._usage_null}{extra}}}'


class ChatReply(Reply):
    KIND, CHUNK, PREFIX, BODY = "chat.completion", "chat.completion.chunk", "chatcmpl", "delta"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._content: list[str] = []
        self._thought: list[str] = []
        self._calls: list[Call] = []

    def first(self) -> list[str]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def _take(self, piece: Piece) -> list[Delta]:
        reasoning = self._reasoning
        assert reasoning is not None
        thinking = reasoning.kind == "reasoning"
        parts = reasoning.push(piece)
        if thinking or reasoning.kind == "reasoning":
            self.reasoning_tokens += 1
        else:
            self._note(piece)
        return self._parts(parts)

    def _rest(self) -> list[Delta]:
        assert self._reasoning is not None
        out = self._parts(self._reasoning.finish())
        if self._parser is not None:
            out += [self._answer(a) for a in self._parser.finish()]
        return out

    def _parts(self, parts: list[tuple[str, str]]) -> list[Delta]:
        out: list[Delta] = []
        for kind, text in parts:
            if kind == "reasoning":
                self._thought.append(text)
                out.append({"reasoning_content": text})
            elif self._parser is None:
                out.append(self._answer(text))
            else:
                out += [self._answer(a) for a in self._parser.push(text)]
        return out

    def _answer(self, part: str | Call) -> Delta:
        if isinstance(part, str):
            self._content.append(part)
            return {"content": part}
        self._calls.append(part)
        return {"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]}

    def _said(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["tool_calls"] = [_call(c) for c in self._calls]
        return {"message": message}

    def _nothing(self) -> Any:
        return {}

    def _reason(self, reason: str | None) -> str:
        return "tool_calls" if self._calls and reason != "length" else super()._reason(reason)

    def _entry(self, piece: Piece) -> str:
        return dumps(tokens.chat_entry(self._tokenizer, piece))

    def _logprobs(self, entries: list[str]) -> str:
        return f'{{"content":[{",".join(entries)}],"refusal":null}}'


class TextReply(Reply):
    KIND, CHUNK, PREFIX, BODY = "text_completion", "text_completion", "cmpl", "text"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._text: list[str] = []
        self._offset = 0  # of the next token in the text

    def _take(self, piece: Piece) -> list[Delta]:
        self._note(piece)
        self._text.append(piece.text)
        return [piece.text] if piece.text else []  # type: ignore[list-item]

    def _rest(self) -> list[Delta]:
        return []

    def _said(self) -> dict[str, Any]:
        return {"text": "".join(self._text)}

    def _nothing(self) -> Any:
        return ""

    def _entry(self, piece: Piece) -> str:
        offset, self._offset = self._offset, self._offset + len(piece.text)
        return tokens.text_entry(self._tokenizer, piece, offset)

    def _logprobs(self, entries: list[str]) -> str:
        return tokens.text_lists(entries)


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
