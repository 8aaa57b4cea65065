"""The studio for a plain `streamlit run app.py`; `headscope studio` serves the same pages and guards them better."""

from headscope.studio.serve import navigation

navigation.show()
