"""The studio's entry: which pages there are. `headscope studio` runs it."""

from pathlib import Path

import streamlit as st

PAGES = Path(__file__).parent / "pages"

st.navigation(
    [
        st.Page(PAGES / "heads.py", title="Heads", icon=":material/grid_view:", default=True),
        st.Page(PAGES / "tune.py", title="Tune", icon=":material/tune:"),
        st.Page(PAGES / "search.py", title="Search", icon=":material/travel_explore:"),
        st.Page(PAGES / "configs.py", title="Configs", icon=":material/inventory_2:"),
        st.Page(PAGES / "learn.py", title="Learn", icon=":material/school:"),
    ],
    position="top",
).run()
