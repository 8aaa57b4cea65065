"""What `headscope studio` has Streamlit run.

It stands apart from `app.py` because Streamlit takes a `pages` folder beside its script for a page list of its own
until the script has run once: a link to a page, opened first, would run that page's file alone.
"""

from headscope.studio.serve import navigation

navigation.show()
