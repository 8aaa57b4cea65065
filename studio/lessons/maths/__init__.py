"""What the chapters show, computed by the engine and drawn by nobody: frozen results, free of Streamlit and plotly."""
