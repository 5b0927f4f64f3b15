"""The charts of a report as Vega-Lite specifications, by altair.

A specification names its data sets and leaves them empty. The page fills them, and refills them when the user
types a price or picks a run; `picture` fills them once. The style, light or dark, sets the colours.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    import altair

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

#: Okabe and Ito's colours for colour-blind readers, made darker: a contrast of 3:1 or more on white.
COLOURS = ("#0072b2", "#c44e00", "#00805a", "#a8457f", "#7d6200", "#262626", "#6f4c9b", "#6b6b6b")
_QUIET, _WARNING = "#8a8a8a", "#d55e00"
_HEIGHT = 300


def load_altair() -> Any:
    """Return the module altair. Raises UserError without the extra."""
    try:
        import altair
        import vl_convert  # noqa: F401  # together in the extra
    except ImportError:
        raise UserError(
            "a report's page and chart need altair, which is not installed",
            "pip install 'fastlaunch[report]'; --format md, csv and json do not need it",
        ) from None
    return altair


_PRINT_BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""


@contextmanager
def vega_bundle() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the JavaScript of Vega, Vega-Lite and Vega-Embed, as an ES module.

    Another process makes it, since that takes a second and would block every thread of this process.
    """
    with subprocess.Popen([sys.executable, "-P", "-c", _PRINT_BUNDLE], stdout=subprocess.PIPE) as process:

        def bundle() -> str:
            text, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"vl-convert ended with {process.returncode}")
            return text.decode()

        try:
            yield bundle
        finally:
            process.kill()


def _log_axis(scale: str) -> dict[str, Any]:
    """Return an axis that labels 1, 2, 5, 10 and so on; every tick if it spans less than a factor of 6."""
    is_short = f"domain('{scale}')[1] < 6 * domain('{scale}')[0]"
    is_round = "indexof('125', format(datum.value, '.0e')[0]) >= 0"
    return {"labelExpr": f"{is_short} || {is_round} ? format(datum.value, '~g') : ''", "labelFlush": 8}


def cost_against_time(unit: str, names: Sequence[str]) -> Spec:
    """Return the main chart: USD against hours per million samples, their intervals, and the Pareto front.

    names: of the colours, in order. Data sets: `rows` with name, colour, kind (measured, predicted, or
    unranked), hours and usd with their limits (hours_low, usd_high, ...), an optional label and its side;
    `front` with hours and usd.
    """
    alt = load_altair()
    rows, front = alt.NamedData("rows"), alt.NamedData("front")
    x = alt.X("hours:Q", title=f"hours for a million {unit}").scale(type="log", nice=False, padding=30)
    y = alt.Y("usd:Q", title=f"USD for a million {unit}").scale(type="log", nice=False, padding=30)
    x, y = x.axis(**_log_axis("x")), y.axis(**_log_axis("y"))
    colour = _colour(alt, names).legend(**_LEGEND)
    ends = alt.Chart(rows)
    marks: Mapping[str, Mapping[str, Any]] = {
        "measured": {"filled": True},
        "predicted": {"shape": "diamond", "strokeWidth": 2},
        "unranked": {"shape": "cross", "strokeWidth": 2},
    }
    tooltip = [
        alt.Tooltip("name:N", title="row"),
        alt.Tooltip("kind:N", title="it is"),
        alt.Tooltip("usd:Q", title=f"USD per million {unit}", format=",.3~f"),
        alt.Tooltip("hours:Q", title=f"hours per million {unit}", format=",.3~g"),
    ]
    layers = [
        alt.Chart(front)
        .mark_line(interpolate="step-after", strokeDash=[5, 4], color=_QUIET)
        .encode(x=x, y=y),
        ends.mark_rule(opacity=0.6).encode(x=alt.X("hours_low:Q"), x2="hours_high:Q", y=y, color=colour),
        ends.mark_rule(opacity=0.6).encode(x=x, y=alt.Y("usd_low:Q"), y2="usd_high:Q", color=colour),
        *(
            ends.transform_filter(alt.datum.kind == kind)
            .mark_point(size=90, opacity=1, **mark)
            .encode(x=x, y=y, color=colour, tooltip=tooltip)
            for kind, mark in marks.items()
        ),
        *(
            ends.transform_filter((alt.datum.label != None) & (alt.datum.side == side))  # noqa: E711
            .mark_text(align=align, dx=dx, dy=-8, fontSize=11, lineBreak="\n")
            .encode(x=x, y=y, text="label:N")
            for side, align, dx in (("right", "left", 9), ("left", "right", -9))
        ),
    ]
    return _spec(alt.layer(*layers), f"Cost against time for a million {unit}", rows=[], front=[])


def bars(title: str, names: Sequence[str]) -> Spec:
    """Return bars with intervals. Data set `bars`, in their order: name, value, low, high, colour, ranked.

    names: of the colours, in order.
    """
    alt = load_altair()
    data = alt.NamedData("bars")
    y = alt.Y("name:N", title=None, sort=None)
    tooltip = [alt.Tooltip("name:N", title="row"), alt.Tooltip("value:Q", title=title, format=",.4~g")]
    drawn = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title),
            y=y,
            color=_colour(alt, names).legend(None),
            opacity=alt.when(alt.datum.ranked).then(alt.value(0.9)).otherwise(alt.value(0.35)),
            tooltip=tooltip,
        )
    )
    limits = alt.Chart(data).mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q", y=y)
    return _spec(alt.layer(drawn, limits), title, bars=[])


def step_times() -> Spec:
    """Return the step time over the steps of a run.

    Data sets: `steps` (step, ms, rank), `warmup` (first, last), `outliers` (as steps). The page sets the
    domain of y to the counted steps, since the first step of a run takes many times as long.
    """
    alt = load_altair()
    x, y = alt.X("step:Q", title="step"), alt.Y("ms:Q", title="step time in ms")
    tooltip = ["rank:N", "step:Q", alt.Tooltip("ms:Q", format=",.4~g")]
    layers = [
        alt.Chart(alt.NamedData("warmup"))
        .mark_rect(opacity=0.18, color=_QUIET)
        .encode(x="first:Q", x2="last:Q"),
        alt.Chart(alt.NamedData("steps"))
        .mark_line(strokeWidth=1.3, clip=True)
        .encode(x=x, y=y, color=alt.Color("rank:N", title=None).legend(**_LEGEND)),
        alt.Chart(alt.NamedData("outliers"))
        .mark_point(shape="triangle-up", size=70, filled=True, opacity=1, color=_WARNING)
        .encode(x=x, y=y, tooltip=tooltip),
    ]
    return _spec(alt.layer(*layers), "Step time over the steps of a run", steps=[], warmup=[], outliers=[])


def step_parts(parts: Sequence[str]) -> Spec:
    """Return stacked bars of where a step's time goes. Data set `parts`: name, part, ms, order."""
    alt = load_altair()
    drawn = (
        alt.Chart(alt.NamedData("parts"))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="ms of a profiled step"),
            y=alt.Y("name:N", title=None, sort=None),
            color=alt.Color("part:N", title=None).legend(**_LEGEND).scale(domain=list(parts)),
            order="order:Q",
            tooltip=["name:N", "part:N", alt.Tooltip("ms:Q", format=",.4~g")],
        )
    )
    return _spec(drawn, "Where the time of a step goes", parts=[])


def losses() -> Spec:
    """Return loss curves. Data sets `training` and `held_out`, each with step, loss and name."""
    alt = load_altair()
    x = alt.X("step:Q", title="step")
    y = alt.Y("loss:Q", title="loss").scale(zero=False)
    colour = alt.Color("name:N", title=None).legend(**_LEGEND)
    tooltip = ["name:N", "step:Q", alt.Tooltip("loss:Q", format=".5~g")]
    layers = [
        alt.Chart(alt.NamedData("training"))
        .mark_line(strokeWidth=1, opacity=0.55)
        .encode(x=x, y=y, color=colour, detail="run:N"),
        alt.Chart(alt.NamedData("held_out"))
        .mark_line(strokeWidth=2, point={"filled": True, "size": 45})
        .encode(x=x, y=y, color=colour, detail="run:N", tooltip=tooltip),
    ]
    return _spec(alt.layer(*layers), "Training and held-out loss", training=[], held_out=[])


def price_history() -> Spec:
    """Return prices over time. Data set `prices`: date, usd, offer; each holds until the next."""
    alt = load_altair()
    drawn = (
        alt.Chart(alt.NamedData("prices"))
        .mark_line(interpolate="step-after", point={"filled": True, "size": 45})
        .encode(
            x=alt.X("date:T", title=None).axis(format="%b %Y", labelOverlap=True),
            y=alt.Y("usd:Q", title="USD per hour of an instance"),
            color=alt.Color("offer:N", title=None).legend(**_LEGEND),
            tooltip=["offer:N", "date:T", alt.Tooltip("usd:Q", format=",.4~f")],
        )
    )
    return _spec(drawn, "Prices of the instances over time", prices=[])


def picture(spec: Spec, datasets: Mapping[str, Rows]) -> bytes:
    """Return the chart with these data as a PNG, doubled, 820 pixels wide unless it has a width."""
    import vl_convert

    config = {
        **{"background": "white", "font": "DejaVu Sans", "view": {"stroke": None}},
        # Labels would lie on its lines.
        "axis": {"grid": False},
        **{"legend": {"columns": 6, "symbolOpacity": 1}, "range": {"category": list(COLOURS)}},
    }
    # The page fits a chart to its own width; a picture has a fixed one.
    width = 820 if spec["width"] == "container" else spec["width"]
    filled = {**spec, "width": width, "datasets": dict(datasets), "config": config}
    return vl_convert.vegalite_to_png(filled, scale=2)


#: Above the chart, where a phone has room.
_LEGEND: Mapping[str, Any] = {"orient": "top", "labelLimit": 260}


def _colour(alt: Any, names: Sequence[str]) -> "altair.Color":
    """Return the colour of a recipe: its own in all charts that are given the same `names`."""
    colour: altair.Color = alt.Color("colour:N", title="recipe").scale(domain=list(names))
    return colour


def _spec(chart: "altair.LayerChart | altair.Chart", description: str, **datasets: Rows) -> Spec:
    sized = chart.properties(width="container", height=_HEIGHT, description=description)
    # Only a test validates it: Vega-Lite's schema takes longer to check than all the rest.
    spec = sized.to_dict(validate=False)
    # The page has a style of its own, for light and dark.
    spec.pop("config", None)
    return {**spec, "datasets": dict(datasets)}
