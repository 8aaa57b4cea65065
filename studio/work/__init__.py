"""What a page has done, free of streamlit: comparisons, searches, exports, estimates."""
