"""Figures drawn by a small build of plotly.js, which a browser has ready long before the one that streamlit brings.

Streamlit's figures need 4.7 MB of script with maps and 3D, a second and more of a slow machine's time before the
first line is drawn. The lessons draw cells, bars and lines, for which plotly's own cartesian build (1.5 MB) is enough.
`studio/server.py` serves it under `SCRIPT`; the page loads it once, when the first figure arrives. Under a plain
`streamlit run` nobody serves it, and streamlit draws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from headscope.studio.charts import charts

SCRIPT = "plotly-cartesian-4.1.1.min.js"
"""The name in the address carries the version, so that browsers may keep the file for good."""

served = False
"""Whether this process answers for `SCRIPT`: the server says so."""

FILE = Path(__file__).resolve().parents[1] / "ui" / "assets" / SCRIPT

LIBRARY = """
function library(name) {
  window.headscopePlotly ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = new URL(name, document.baseURI);
    script.onload = () => done(window.Plotly);
    script.onerror = fail;
    document.head.append(script);
  });
  return window.headscopePlotly;
}
"""
"""Loads the script once, for whoever asks first."""

_DRAW = (
    LIBRARY
    + """
// One figure after the other, each shown before the next is begun.
function inTurn(draw) {
  const turn = window.headscopeTurn ?? Promise.resolve();
  window.headscopeTurn = turn.then(draw).catch(console.error).then(() => new Promise((next) => setTimeout(next)));
}

export default function ({ data, parentElement, setTriggerValue }) {
  const host = parentElement.querySelector(".headscope-figure");
  const { data: traces, layout } = JSON.parse(data.figure);
  host.style.minHeight = layout.height + "px";
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", data.alt);
  let watch, gone = false;
  inTurn(async () => {
    const plotly = await library(data.script).catch(() => null);
    if (gone) return;
    if (!plotly) {
      host.textContent = "The script that draws figures did not load: start the studio with `headscope studio`.";
      return;
    }
    await plotly.react(host, traces, layout, data.config);
    host.removeAllListeners("plotly_click");
    if (data.clicks) {
      host.on("plotly_click", ({ points }) =>
        setTriggerValue("selection", { points: points.map(({ x, y }) => ({ x, y })) }));
    }
    watch = new ResizeObserver(() => host.offsetWidth && plotly.Plots.resize(host));
    watch.observe(host);
  });
  return () => { gone = true; watch?.disconnect(); };
}
"""
)

_mount = st.components.v2.component(
    "headscope_figure", html='<div class="headscope-figure"></div>', js=_DRAW, isolate_styles=False
)


def draw(figure: go.Figure, key: str, alt: str, on_click: Callable[[], None] | None = None) -> None:
    """Shows a figure of heat maps, bars and lines at the width that there is. After a click on a point `on_click` runs
    and may ask `clicked`."""
    clicks = on_click is not None
    if not served:
        options: dict[str, Any] = {"on_select": on_click, "selection_mode": "points"} if clicks else {}
        st.plotly_chart(figure, theme=None, key=key, config=charts.CONFIG, alt=alt, **options)
        return
    more: dict[str, Any] = {"on_selection_change": on_click} if clicks else {}
    data = {"figure": figure.to_json(), "config": charts.CONFIG, "alt": alt, "script": SCRIPT, "clicks": clicks}
    _mount(key=key, data=data, **more)


def clicked(key: str) -> tuple[float, float] | None:
    """The (x, y) of the point that was clicked last; streamlit's own figure reports a second click on it as none."""
    points = st.session_state[key]["selection"]["points"]
    kept = f"{key}-clicked"
    if points:
        st.session_state[kept] = float(points[-1]["x"]), float(points[-1]["y"])
    return st.session_state.get(kept)
