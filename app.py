"""The studio's entry: which pages there are. `headscope studio` runs it."""

from pathlib import Path

import streamlit as st

PAGES = Path(__file__).parent / "pages"

HEADS = st.Page(PAGES / "heads.py", title="Heads", url_path="start", default=True)


def heads() -> None:
    """Leads to the main page, which is at / and only keeps the address of its `url_path` from other pages."""
    st.switch_page(HEADS, query_params=st.query_params.to_dict())


st.navigation(
    [
        HEADS,
        st.Page(PAGES / "tune.py", title="Tune"),
        st.Page(PAGES / "search.py", title="Search"),
        st.Page(PAGES / "configs.py", title="Configs"),
        st.Page(PAGES / "learn.py", title="Learn"),
        st.Page(heads, title="Heads", url_path="heads", visibility="hidden"),
    ],
    position="top",
).run()
