"""The studio's entry: which pages there are. `headscope studio` runs it."""

from pathlib import Path

import streamlit as st

PAGES = Path(__file__).parent / "pages"

st.navigation(
    [
        st.Page(PAGES / "heads.py", title="Heads", default=True),
        st.Page(PAGES / "tune.py", title="Tune"),
        st.Page(PAGES / "search.py", title="Search"),
        st.Page(PAGES / "configs.py", title="Configs"),
        st.Page(PAGES / "learn.py", title="Learn"),
    ],
    position="top",
).run()
