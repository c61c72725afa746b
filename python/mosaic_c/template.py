"""Chat templates: finding a checkpoint's own and running it in the sandbox that transformers uses.

Owns: the Jinja environment and what a template gets to see. Promises: the same text as in
transformers' apply_chat_template(tokenize=False); whatever a template does wrong is a one-line
MosaicError. Knows nothing of tokens. `jinja2` is imported on first use only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import MosaicError, UsageError

# Names a client may use for a message's reasoning; templates read the first, some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
_DEEPEST = 100


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Text of a conversation.

    template: Jinja source. messages: {"role": ..., "content": str or list of parts, ...} each; keys
    whose value is None are dropped. variables: further names the template may read (bos_token,
    enable_thinking, ...). Raises UsageError for messages that are not JSON-like, MosaicError
    ETEMPLATE for whatever the template raises.
    """
    import jinja2

    compiled = _compile(template)
    context = {
        "messages": prepare(messages),
        "tools": plain(tools),
        "documents": plain(documents),
        "add_generation_prompt": add_generation_prompt,
    }
    for name, value in plain(dict(variables or {})).items():
        if name in context or not isinstance(name, str):
            raise UsageError(f"chat template variables: {name!r} is taken: expected another name")
        context[name] = value
    try:
        return compiled.render(context)
    except MosaicError:
        raise
    except jinja2.TemplateError as e:
        raise MosaicError(f"chat template: {e.message or type(e).__name__}", "ETEMPLATE") from None
    except Exception as e:  # a template may fail in any way Python can
        raise MosaicError(f"chat template: {type(e).__name__}: {e}", "ETEMPLATE") from None


def chat_template(
    folder: Path, config: Mapping[str, Any], name: str | None = None, tools: bool = False
) -> str | None:
    """A checkpoint's template: by name, or "tool_use" when there are tools and one exists, else
    "default". config: tokenizer_config.json. None when the folder has no template at all;
    UsageError for a name it does not have.
    """
    found = _templates(folder, config)
    if not found:
        return None
    if name is None:
        name = "tool_use" if tools and "tool_use" in found else "default"
    if name not in found:
        have = ", ".join(sorted(found))
        raise UsageError(f"no chat template '{name}' in {folder}: expected one of {have}")
    return found[name]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Template files, where there are any, replace those inside the config."""
    files = {"default": folder / "chat_template.jinja"}
    files.update(
        {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    )
    found: dict[str, str] = {}
    for name, path in files.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as e:
            raise MosaicError(f"{path}: {e}", "EFORMAT") from None
    inline = config.get("chat_template")
    if found or inline is None:
        return found
    if isinstance(inline, str):
        return {"default": inline}
    try:
        found = {entry["name"]: entry["template"] for entry in inline}
    except (TypeError, KeyError):
        found = {"": inline}
    if not all(isinstance(part, str) for pair in found.items() for part in pair):
        what = "expected a string or a list of {name, template}"
        raise MosaicError(f"{folder}/tokenizer_config.json: chat_template: {what}", "EFORMAT")
    return found


@lru_cache(maxsize=16)
def compared_strings(template: str) -> frozenset[str]:
    """String constants that a template compares with or passes to a method, filter or test."""
    from jinja2 import nodes

    tree = _compile(template).environment.parse(template)
    bound: dict[str, set[str]] = {}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Const):
            bound.setdefault(node.target.name, set()).add(node.node.value)
    found: set[Any] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        inside = [node.expr, *node.ops] if isinstance(node, nodes.Compare) else node.args
        for part in inside:
            for leaf in (part, *part.find_all((nodes.Const, nodes.Name))):
                if isinstance(leaf, nodes.Const):
                    found.add(leaf.value)
                elif isinstance(leaf, nodes.Name):
                    found |= bound.get(leaf.name, set())
    return frozenset(value for value in found if isinstance(value, str))


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Names that a template reads and does not set."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_compile(template).environment.parse(template)))


def prepare(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data, without None values, with reasoning under the names that are read."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError("messages: expected a list of at least one {role, content} object")
    prepared = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"messages[{index}]: expected an object, got {type(message).__name__}")
        copy = plain({key: value for key, value in message.items() if value is not None})
        reasoning = next((copy[key] for key in REASONING if copy.get(key) is not None), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        prepared.append(copy)
    return prepared


def plain(value: Any, depth: int = 0) -> Any:
    """A copy in plain JSON types: the sandbox need not know what else an object could do."""
    if depth > _DEEPEST:
        raise UsageError(f"messages and tools: nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, depth + 1) for v in value]
    raise UsageError(f"messages and tools: expected JSON values, got {type(value).__name__}")


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    """The compiled template, in the environment that transformers gives chat templates."""
    from datetime import datetime

    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %}: marks text to train on; here it only renders."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """namespace() whose names cannot reach what Python keeps under leading underscores."""

        # No parameter is named self: a template may say namespace(self=1).
        def __init__(*args: Any, **kwargs: Any) -> None:
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                check_name(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    class Dict:
        """dict() without the class behind it."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
            return dict.fromkeys(keys, value)

    def check_name(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"namespace attribute {name!r} starts with an underscore"
            )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=Dict(),
        namespace=Namespace,
    )
    try:
        return env.from_string(template)
    except jinja2.TemplateError as e:
        raise MosaicError(f"chat template: {e.message or type(e).__name__}", "ETEMPLATE") from None
    except (RecursionError, MemoryError, ValueError) as e:
        raise MosaicError(f"chat template: {type(e).__name__}: {e}", "ETEMPLATE") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: HTML unescaped, non-ASCII kept unless asked otherwise."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    # CJK extension B stays: encode_chat lets its letters stand for others, which an escape would
    # part from them.
    return re.sub("[^\\x00-\\x7f\U00020000-\U0002a6d6]", lambda m: json.dumps(m[0])[1:-1], text)
