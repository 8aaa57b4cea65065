"""Which pages there are: one list for whatever script Streamlit starts with."""

from __future__ import annotations

import streamlit as st

from headscope.engine.base.places import ROOT

PAGES = ROOT / "pages"


def show() -> None:
    """The page that the address names, under a bar with links to all."""
    heads = st.Page(PAGES / "heads.py", title="Heads", url_path="start", default=True)

    def to_heads() -> None:
        """Leads to the main page, which is at / and only keeps the address of its `url_path` from other pages."""
        st.switch_page(heads, query_params=st.query_params.to_dict())

    st.navigation(
        [
            heads,
            st.Page(PAGES / "tune.py", title="Tune"),
            st.Page(PAGES / "search.py", title="Search"),
            st.Page(PAGES / "configs.py", title="Configs"),
            st.Page(PAGES / "learn.py", title="Learn"),
            st.Page(to_heads, title="Heads", url_path="heads", visibility="hidden"),
        ],
        position="top",
    ).run()
