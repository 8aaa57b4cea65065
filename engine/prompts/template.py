"""A text as one user turn of a model's chat template, or one sentence that says why that cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope.engine.base.errors import ModelError, UnusableModel

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

PLAIN = "use --no-template, which gives the model the plain text"


def has_template(loaded: LoadedModel) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(loaded.tokenizer, "chat_template", None))


def render(loaded: LoadedModel, text: str) -> str:
    """The text as a user's turn, with the opening of the answer.

    Content is given as text and, where the template raises or loses it, as a list of parts, which multimodal
    templates read. Raises ModelError when there is no template, when there are several and none is the default, when
    it raises, and when the text is absent from what it makes.
    """
    if not has_template(loaded):
        raise UnusableModel(f"{loaded.name} has no chat template: {PLAIN}")
    templates = loaded.tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        names = ", ".join(sorted(map(str, templates)))[:120]
        raise UnusableModel(f"{loaded.name} has several chat templates ({names}) and none is the default: {PLAIN}")
    problem: Exception | None = None
    for content in (text, [{"type": "text", "text": text}]):
        try:
            rendered = _apply(loaded, content)
        except Exception as error:  # a template is a program of the model's author, and may raise anything
            problem = problem or error
            continue
        if text.strip() in rendered:
            return rendered
    if problem is not None:
        why = " ".join(str(problem).split())[:160].rstrip(" .:") or type(problem).__name__
        raise ModelError(f"the chat template of {loaded.name} fails ({why}): {PLAIN}") from problem
    raise ModelError(f"the chat template of {loaded.name} leaves the prompt's text out: {PLAIN}")


def _apply(loaded: LoadedModel, content: Any) -> str:
    turns = [{"role": "user", "content": content}]
    rendered = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if not isinstance(rendered, str):
        raise TypeError(f"it gives {type(rendered).__name__} where text belongs")
    return rendered
