"""The fields of a pattern's budgets, and the edits that they make. Edits count on the newest draft, so that an edit of
another tab stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from headscope.engine.patterns.families import Fraction, Pattern
from headscope.studio.base import words
from headscope.studio.data import editor
from headscope.studio.ui import state
from headscope.studio.ui.context import RunContext


def budgets(page: RunContext) -> None:
    """One number field a budget, in tokens or as a share of the prompt; and how they are counted."""
    pattern = page.pattern
    fields = editor.fields_of(pattern)
    if not fields:
        st.caption("Dense computes every causal pair: nothing to choose.")
        return
    columns = st.columns(2)
    for index, field in enumerate(fields):
        with columns[index % 2]:
            number_field(page, pattern, field)
    with st.container(horizontal=True):
        share_toggle(page, pattern, fields)
        variant_toggle(page, pattern)


def number_field(page: RunContext, pattern: Pattern, field: editor.Field) -> None:
    """The field of one budget."""
    view, tokens = page.view, page.run.row.tokens
    value = editor.values_of(pattern)[field.name]
    # A key of the head's own: text that was refused stays in its field, and belongs to this head. With None for a
    # value, an emptied field says None, which is no edit, and not the least number.
    key = f"budget-{field.name}-{view.layer}-{view.head}"

    def write(number: Any) -> None:
        if number is not None:
            rebuild(page, pattern, lambda now: now | {field.name: editor.entered(value, number)})

    if isinstance(value, Fraction):
        st.number_input(
            field.label + ", % of prompt",
            0.01,
            100.0,
            None,
            step=0.5,
            format="%.2f",
            help=field.help,
            **state.bind(key, round(value.of * 100, 2), write),
        )
    else:
        st.number_input(
            field.label,
            field.least if field.offered is None else field.offered,
            max(tokens, int(value)) if field.most is None else field.most,
            None,
            step=step(field, int(value)),
            help=field.help,
            **state.bind(key, int(value), write),
        )


def share_toggle(page: RunContext, pattern: Pattern, fields: tuple[editor.Field, ...]) -> None:
    """Budgets as counts, or as shares that grow with the prompt."""
    tokens, values = page.run.row.tokens, editor.values_of(pattern)
    shared = {field.name for field in fields if field.share and field.grows}

    def switch(on: bool) -> None:
        def change(now: dict[str, Any]) -> dict[str, Any]:
            return {
                name: editor.as_share(value, tokens, on) if name in shared else value for name, value in now.items()
            }

        rebuild(page, pattern, change)

    st.toggle(
        "As a share of the prompt",
        **state.bind("share", any(isinstance(value, Fraction) for value in values.values()), switch),
        help="Budgets then grow with the length of the prompt",
    )


def variant_toggle(page: RunContext, pattern: Pattern) -> None:
    """The other form of the family, where it has one: whole windows in place of single distances, say."""
    if pattern.variant is None:
        return

    def vary(on: bool) -> None:
        rebuild(page, pattern, lambda now: editor.values_of(editor.build(pattern.kind, now).switched(on)))

    st.toggle(
        pattern.variant.label,
        **state.bind("windowed", pattern.variant.on, vary),
        help=pattern.variant.help,
    )


def step(field: editor.Field, value: int) -> int:
    """How much a click on + or - changes a budget."""
    return field.step or (8 if value < 128 else 32)


def rebuild(page: RunContext, drawn: Pattern, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The head's pattern with its numbers changed; what does not fit becomes a sentence and changes nothing.

    The newest numbers count, so that an edit of another tab stays, unless it chose other fields than were drawn here.
    """
    view = page.view
    newest = page.lab.drafts.newest(page.draft).patterns[view.layer][view.head]
    same = newest.kind == drawn.kind and editor.fields_of(newest) == editor.fields_of(drawn)
    try:
        edit(page, editor.build(drawn.kind, change(editor.values_of(newest if same else drawn))))
    except ValueError as error:
        view.notice = f"That budget does not fit: {error}."


def edit(page: RunContext, pattern: Pattern) -> None:
    """One edit of this head."""
    spread(page, "this head", [(page.view.layer, page.view.head)], pattern)


def spread(page: RunContext, where: str, heads: list[tuple[int, int]], pattern: Pattern) -> None:
    """The pattern on these heads."""
    newest = page.lab.drafts.newest(page.draft)
    here = f"L{page.view.layer} H{page.view.head}"
    name = here if where == "this head" else f"{where} of {here}"
    changed = newest.edited(f"{name}: {words.label(pattern)}", heads, pattern)
    if changed is not newest:
        page.lab.drafts.keep(changed)


def undo(page: RunContext) -> None:
    """Takes the last edit back and looks at the head that it changed."""
    newest = page.lab.drafts.newest(page.draft)
    if not newest.edits:
        return
    changes = newest.edits[-1].changes
    page.lab.drafts.keep(newest.undone())
    if changes:
        page.view.go(*changes[0][0])
