"""Learn: the three patterns by hand, in chapters, with the engine's own numbers."""

import streamlit as st

from headscope.studio.lessons import contents
from headscope.studio.ui import state, widgets

st.set_page_config(page_title="Learn · headscope", layout="wide")
st.html(widgets.STYLE)
state.keep_link(state.view(), None)
contents.show()
