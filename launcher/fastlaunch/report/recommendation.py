"""A recommendation as text, a table and plain data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastlaunch.analysis.anchors import CLASS_MEANINGS
from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.configurations import LeftOut
from fastlaunch.analysis.convergence import MARGIN, WITHIN
from fastlaunch.analysis.memory import MemoryNeed
from fastlaunch.analysis.rate import Evidence, Rate, in_one_part
from fastlaunch.analysis.recommend import Choice, Limits, Recommendation, takes_too_long
from fastlaunch.analysis.verdicts import is_single
from fastlaunch.catalog.hardware import TRAINING_PLAN, identify
from fastlaunch.catalog.prices import UPDATE_COMMAND
from fastlaunch.core.ownership import MAX_MINUTES
from fastlaunch.core.tables import KEPT, Column, table
from fastlaunch.core.terminal import command_lines, filled
from fastlaunch.core.units import by_reason
from fastlaunch.measure.summary import Interval
from fastlaunch.report.columns import whose
from fastlaunch.report.cost import cost_text, hours_text, rate_to_json, tokens_text, usd_text
from fastlaunch.report.data import fields_to_json
from fastlaunch.report.text import (
    NO_LETTERS,
    Labels,
    Letters,
    at_a_glance,
    bulleted,
    dollars,
    doubt_of,
    more_text,
    number,
)

#: The most table lines on a screen, and the most names in a note.
_MOST_LINES, _FEW_LINES, _MOST_OVER, _MOST_NAMES = 14, 5, 5, 2
_MOST_PUBLISHED = 3
#: A screen shows a choice of the front only if it is faster by this share.
_CLEARLY = 0.03
#: Evidence in a sentence.
_IN_WORDS = {
    "measured": "measured",
    "same GPU": "measured on the same GPU",
    "published": "as published",
    "predicted": "predicted",
}
#: What the notes of the table mean, in the order of the legend.
_NOTES = {
    "open": "range overlaps",
    "front": "all else is dearer or slower",
}
_BOUGHT = {"spot": "as spot", "capacity-block": "in a capacity block", TRAINING_PLAN: "in a training plan"}


def as_text(recommendation: Recommendation, *, width: int, in_full: bool = False) -> str:
    """Return the recommendation as text: the pick, how sure it is, other choices, what to type next.

    in_full: show every row, column and note, also where nothing can be recommended.
    """
    in_full = in_full or not recommendation.num_choices
    every = _lines(recommendation)
    lines = every if in_full else _few(recommendation, every)
    named = (*_weighed(recommendation), *lines)
    letters = Letters(in_one_part(choice.configuration.query.recipe) for choice in named)
    reasons = [
        *why(recommendation, letters.in_words, in_full=in_full),
        _next(recommendation, letters),
    ]
    parts = [
        filled(sentence(recommendation, letters.in_words), width),
        "\n".join(filled(text, width) for text in reasons if text),
    ]
    below: list[str] = []
    if lines:
        below = [
            filled(_heading(recommendation, lines), width),
            _table(recommendation, lines, letters, width, in_full=in_full),
            "" if in_full else more_text(len({*map(id, every)} - {*map(id, lines)})),
            letters.legend(width),
        ]
    if in_full and (recommendation.num_choices or not _unbought(recommendation)):
        below.append(_memory(recommendation, width))
    below.append(bulleted(_notes(recommendation, lines, letters.in_words, in_full=in_full), width))
    experiment = recommendation.proposed
    commands = {
        "image": recommendation.build,
        "measure first": experiment.command if experiment else None,
        "or train now" if experiment else "train": recommendation.command if recommendation.pick else None,
    }
    lines_of = [command_lines(command, width, name) for name, command in commands.items() if command]
    below.append("\n".join(lines_of))
    # A short screen has no lines to spare.
    parts.append(("\n\n" if in_full else "\n").join(filter(None, below)))
    return "\n\n".join(filter(None, parts))


def _weighed(recommendation: Recommendation) -> list[Choice]:
    """Return the choices that the first sentences weigh, the pick first."""
    experiment, rival = recommendation.proposed, recommendation.rival
    weighed = (
        *(recommendation.pick, recommendation.runner_up, _closest(recommendation)),
        *(experiment and experiment.choice, rival and rival.choice),
    )
    return [choice for choice in weighed if choice]


def _heading(recommendation: Recommendation, lines: Sequence[Choice]) -> str:
    """Return what all lines train: `1,000 images of vit-huge, global batch 8`."""
    job = recommendation.job
    heading = f"{math.ceil(job.samples):,} {job.like.setup.sample_unit} of {job.workload}"
    tokens = lines[0].configuration.rate.tokens_per_sample
    if tokens:
        heading = f"{job.samples * tokens:,.0f} tokens in {heading}"
    batches = {choice.configuration.global_batch for choice in lines}
    batch = "" if len(batches) > 1 else f", global batch {batches.pop():,}"
    limits = _limits(recommendation.limits)
    return f"{heading}{batch}{f', within {limits}' if limits else ''}"


def _limits(limits: Limits) -> str:
    """Return `48 h and $40`; empty without limits."""
    wanted = [
        *([hours_text(limits.deadline_hours)] if limits.deadline_hours is not None else []),
        *([f"${dollars(limits.budget_usd)}"] if limits.budget_usd is not None else []),
    ]
    return " and ".join(wanted)


def sentence(recommendation: Recommendation, letters: Labels = NO_LETTERS) -> str:
    """Return the pick in a sentence, or the reason why there is none."""
    pick, job = recommendation.pick, recommendation.job
    if pick is not None:
        rate = pick.configuration.rate
        name = _named(pick, recommendation, letters)
        once = ", in one run" if rate.row and is_single(rate.row.group) else ""
        advice = "Best so far is" if recommendation.proposed else "Train on"
        evidence = f"{_IN_WORDS[rate.evidence]}{_class(rate)}{once}"
        return at_a_glance(
            f"{advice} {name}: {cost_text(pick.total)}, {evidence}.",
            f"{advice} {name}: {_costs(pick)}, {evidence}.",
            f"{name}: {_costs(pick)}, {rate.evidence_text}{once}.",
        )
    if not recommendation.num_choices:
        answer = f"Nothing can be recommended for {job.workload}"
        return at_a_glance(*(f"{answer}: {why}." for why in _why_nothing(recommendation)))
    limits, closest = recommendation.limits, _closest(recommendation)
    verb = "take" if limits.deadline_hours is not None else "cost"
    answer = f"No choice is certain to {verb} at most {_limits(limits)}"
    if closest is None:
        return f"{answer}."
    name = _named(closest, recommendation, letters)
    in_time = limits.deadline_hours is not None
    amount = hours_text(closest.hours) if in_time else usd_text(closest.total, what="")
    return at_a_glance(f"{answer}; the closest is {name}: {amount}.", f"{answer}; closest: {name}, {amount}.")


def _closest(recommendation: Recommendation) -> Choice | None:
    """Return the choice that comes nearest to the limit, by the upper end of its range.

    None unless there is one limit, which all choices miss.
    """
    limits = recommendation.limits
    known = (*recommendation.front, *recommendation.by_instance, *recommendation.cheapest)
    if recommendation.pick is not None or (limits.deadline_hours is None) == (limits.budget_usd is None):
        return None
    if limits.deadline_hours is None:
        return min(known, key=lambda choice: choice.total.usd.high or choice.usd, default=None)
    return min(known, key=lambda choice: choice.total.hours.high or choice.hours, default=None)


def _why_nothing(recommendation: Recommendation) -> Iterator[str]:
    """Yield the reason why what could train cannot be bought, if there is one; then that nothing can."""
    yield from (out.reason for out in _unbought(recommendation))
    yield "every candidate is left out"


def _unbought(recommendation: Recommendation) -> list[LeftOut]:
    """Return what could train and cannot be bought, if that is why nothing is recommended: the last."""
    return [out for out in recommendation.left_out[-1:] if out.purchase is not None]


def why(
    recommendation: Recommendation, letters: Labels = NO_LETTERS, *, in_full: bool = True
) -> Iterator[str]:
    """Yield how sure the pick is, and in full the price at which it changes and what was measured.

    Without a pick, the sentences are on the cheapest and the fastest choice.
    """
    pick, even = recommendation.pick, recommendation.break_even
    if not recommendation.num_choices:
        yield from (f"{out.hint[:1].upper()}{out.hint[1:]}." for out in _unbought(recommendation) if out.hint)
    if pick is None and recommendation.num_choices and recommendation.limits.deadline_hours is not None:
        cheapest, fastest = recommendation.front[0], recommendation.front[-1]
        if cheapest is fastest:
            yield f"Nothing is faster than the cheapest, which takes {hours_text(cheapest.hours)}."
        else:
            yield f"The cheapest is {_named(cheapest, recommendation, letters)}: {_costs(cheapest)}."
            yield f"The fastest is {_named(fastest, recommendation, letters)}: {_costs(fastest)}."
        is_late = not replace(recommendation.limits, budget_usd=None).allow(fastest)
        if is_late and recommendation.job.max_nodes == 1:
            yield "More machines may be faster: --max-nodes K."
    if pick is None:
        return
    yield from _how_sure(recommendation, pick, letters)
    if not in_full:
        return
    if tokens := tokens_text(pick.configuration.rate, pick.usd, pick.samples):
        yield f"It trains at {tokens}."
    measured = recommendation.cheapest_measured
    if measured is not None and measured not in (pick, recommendation.runner_up):
        name = _named(measured, recommendation, letters)
        yield f"The cheapest that was measured is {name}: {_costs(measured)}."
    if even is not None:
        paid = pick.purchase.paid_usd_per_hour
        up_to = math.floor(100 * even.usd_per_hour) / 100  # above it the pick is already another one
        yield (
            f"By the expected costs, {pick.instance} stays the cheapest up to ${up_to:,.2f} an hour (now"
            f" ${paid:,.2f}); above that it is {_named(even.other, recommendation, letters)}."
        )


def _how_sure(recommendation: Recommendation, pick: Choice, letters: Labels) -> Iterator[str]:
    """Yield whether the pick is settled, what may beat it, the runner-up, and whether it learns."""
    runner_up, limits = recommendation.runner_up, recommendation.limits
    within = _limits(limits)
    is_open = runner_up is not None and runner_up.may_cost_less_than(pick)
    may_be = ""
    named_next = recommendation.proposed or recommendation.rival
    other = named_next.choice if named_next else pick
    if other is not pick and other is not runner_up:
        is_same = other.configuration.query.recipe == pick.configuration.query.recipe
        named = f"The same on {_machines(other)}" if is_same else _named(other, recommendation, letters)
        is_late = other.usd < pick.usd and not limits.allow(other)
        may_be = f"may keep within {within}" if is_late else "may be cheaper"
        may_be = f" {named}{_beside(other, pick)}, {may_be}: {_estimate(other)}."
    if runner_up is not None:
        named = _named(runner_up, recommendation, letters)
        has_range = recommendation.chance is not None and runner_up.total.usd.low is not None
        state = "; settled" if has_range and not is_open else ""
        yield f"Second: {named}{_beside(runner_up, pick)}: {_estimate(runner_up)}{state}."
    if recommendation.chance is None:
        yield f"Not settled, for want of a range.{may_be}"
    elif is_open or may_be:
        chance = f"{min(max(100 * recommendation.chance, 1), 99):.0f}%"
        reason = ", and taken for its stronger evidence" if runner_up and runner_up.usd < pick.usd else ""
        of_all = f"within {within}" if within else "of all"
        yield f"The pick is the cheapest {of_all} with probability {chance}{reason}.{may_be}"
    if row := pick.configuration.rate.row:
        for doubt in doubt_of(row, recommendation.job.like.setup, letters):
            yield f"{doubt[0].upper()}{doubt[1:]}."


def _beside(choice: Choice, pick: Choice) -> str:
    """Return `, 1.6% dearer`; empty where the pick costs nothing."""
    if not pick.usd:
        return ""
    percent = 100 * (choice.usd / pick.usd - 1)
    if abs(percent) < 0.05:
        return ", as dear"
    digits = int(abs(percent) < 9.95)
    return f", {abs(percent):.{digits}f}% {'dearer' if percent > 0 else 'cheaper'}"


def _next(recommendation: Recommendation, letters: Letters) -> str:
    """Return what to do next: to train, or what to measure first; empty without a pick."""
    experiment = recommendation.experiment
    if recommendation.pick is None:
        return ""
    if experiment is None:
        return "Next: train now; no measurement would save as much as it costs."
    if recommendation.proposed is None:
        return f"Next: train now; measuring first would save only ${dollars(experiment.net_usd)} on average."
    choice, pick = experiment.choice, recommendation.pick
    what = _machines(choice) if choice.instance != pick.instance else _recipe(choice, letters.in_words)
    what = "the pick itself" if choice is pick else what
    return (
        f"Next: measure {what} ({hours_text(experiment.hours)}, ${dollars(experiment.usd)}), then recommend"
        f" again. That changes the pick in {100 * experiment.probability:.0f}% of cases, and saves"
        f" ${dollars(experiment.net_usd)} on average over all of them, the measurement paid."
    )


def _estimate(choice: Choice) -> str:
    """Return `$199 (191 to 206), 28.7 h, predicted`."""
    return f"{_costs(choice)}, {choice.configuration.rate.evidence}"


def _named(choice: Choice, recommendation: Recommendation, letters: Labels) -> str:
    """Return `2 x p5.48xlarge with te-fp8`, and how and where it is bought unless that is usual."""
    query, price = choice.configuration.query, choice.purchase.price
    recipe, num_parts = letters(in_one_part(query.recipe)), query.num_parts
    parts = f" and its batch in {num_parts} parts" if num_parts > 1 else ""
    bought = "" if price.purchase == "on-demand" else f" {_BOUGHT[price.purchase]}"
    where = "" if price.region == recommendation.job.own_region else f" in {price.region}"
    return f"{_machines(choice)} with {recipe}{parts}{bought}{where}"


def _machines(choice: Choice) -> str:
    num_nodes = choice.configuration.query.num_nodes
    return f"{num_nodes} x {choice.instance}" if num_nodes > 1 else choice.instance


def _recipe(choice: Choice, letters: Labels) -> str:
    """Return `te-fp8`, or `te-fp8 /2` where each GPU takes its batch in two parts."""
    query = choice.configuration.query
    parts = f" /{query.num_parts}" if query.num_parts > 1 else ""
    return f"{letters(in_one_part(query.recipe))}{parts}"


def _costs(choice: Choice) -> str:
    return cost_text(choice.total, what="")


def _class(rate: Rate) -> str:
    return f" (class {rate.prediction_class})" if rate.prediction_class else ""


def _in_table(rate: Rate) -> str:
    """Return `same GPU` or `class A`, which `_words` spells out."""
    return f"class {rate.prediction_class}" if rate.prediction_class else rate.evidence


def _range(usd: Interval) -> str:
    return usd.range_text(number) or "no range"


def _lines(recommendation: Recommendation) -> list[Choice]:
    """Return the choices of the table: front, runner-up, and the cheapest of each instance family."""
    families: dict[str, Choice] = {}
    for choice in recommendation.by_instance:
        families.setdefault(choice.instance.partition(".")[0], choice)
    # Only choices of the front that are clearly faster than the one before.
    first: list[Choice] = []
    for choice in recommendation.front:
        if not first or choice.hours <= (1 - _CLEARLY) * first[-1].hours:
            first.append(choice)
    first = [*_weighed(recommendation), *first][:_MOST_LINES]
    first += recommendation.by_purchase
    chosen = {id(choice): choice for choice in (*first, *families.values())}
    for choice in recommendation.cheapest:
        if len(chosen) < _FEW_LINES:
            chosen.setdefault(id(choice), choice)
    within = [choice for choice in chosen.values() if recommendation.limits.allow(choice)]
    over = [choice for choice in chosen.values() if not recommendation.limits.allow(choice)]
    lines = [*within, *over[: _MOST_OVER if within else None]][:_MOST_LINES]
    lines += [choice for choice in recommendation.by_purchase if choice not in lines]
    return sorted(lines, key=lambda choice: (_rank(choice, recommendation), choice.usd, choice.hours))


def _few(recommendation: Recommendation, lines: Sequence[Choice]) -> list[Choice]:
    """Return the first lines to show: what the sentences name, each way to buy, the front, the cheapest."""
    front = recommendation.front
    wanted = (
        *_weighed(recommendation),
        *(() if recommendation.pick else (front[0], front[-1])),
        *recommendation.by_purchase,
        *front,
        *lines,
    )
    known = {*map(id, lines)}
    few = [*dict.fromkeys(id(choice) for choice in wanted if id(choice) in known)][:_FEW_LINES]
    return [choice for choice in lines if id(choice) in few]


def _rank(choice: Choice, recommendation: Recommendation) -> int:
    """Return 0 for the pick, 1 within the limits, 2 over them."""
    return 0 if choice is recommendation.pick else 1 if recommendation.limits.allow(choice) else 2


def _note(choice: Choice, recommendation: Recommendation, *, in_full: bool) -> str:
    """Return the one word that the table says of a choice."""
    pick = recommendation.pick
    if pick is None:
        return ""
    if choice is pick:
        return "pick"
    if choice is recommendation.runner_up:
        return "second"
    if not recommendation.limits.allow(choice):
        return "over"
    if choice.may_cost_less_than(pick):
        return "open"
    return "front" if in_full and any(choice is other for other in recommendation.front) else ""


def _table(
    recommendation: Recommendation, lines: Sequence[Choice], letters: Letters, width: int, *, in_full: bool
) -> str:
    """Return the table, without columns that are the same in every line, in full with the less important."""
    columns: list[Column[Choice]] = [
        Column("instance", lambda choice: choice.instance),
        Column("nodes", lambda choice: str(choice.configuration.query.num_nodes), align="right"),
        Column("recipe", lambda choice: _recipe(choice, letters)),
        Column("batch/GPU", lambda choice: str(choice.configuration.query.batch_size_per_gpu), importance=2),
        Column("bought", lambda choice: choice.purchase.price.purchase),
        Column("region", lambda choice: choice.purchase.price.region),
        Column("$", lambda choice: number(choice.usd), align="right"),
        Column(
            "90% range",
            lambda choice: _range(choice.total.usd) if choice.total.usd.low else None,
            align="right",
        ),
        Column("hours", lambda choice: number(choice.hours), align="right"),
        Column(
            "tokens/s",
            lambda choice: (per_s := choice.configuration.rate.tokens_per_s) and f"{per_s.value:,.0f}",
            align="right",
            importance=1,
        ),
        Column(
            "$/M tokens",
            lambda choice: (usd := choice.usd_per_million_tokens) and number(usd),
            align="right",
            importance=3,
        ),
        Column("evidence", lambda choice: _in_table(choice.configuration.rate)),
        Column("whose", lambda choice: (row := choice.configuration.rate.row) and whose(row, [row])),
        Column("note", partial(_note, recommendation=recommendation, in_full=in_full)),
    ]
    usual = {"nodes": "1", "bought": "on-demand", "region": recommendation.job.own_region}
    kept = [
        column
        for column in columns
        if {column.text(choice) for choice in lines} != {usual.get(column.name)}
        and (in_full or column.importance == KEPT)
    ]
    return table(lines, kept, width, rule=True)


def _memory(recommendation: Recommendation, width: int) -> str:
    """Return the table of the memory that one sample takes; empty where it is not reckoned."""
    needs = recommendation.memory
    if not needs:
        return ""
    pairs = [*zip(needs[::2], needs[1::2], strict=True)]
    parts = {"weights": 4, "trained": 4, "activations": 4, "logits": 4, "total": KEPT}
    columns: list[Column[tuple[MemoryNeed, MemoryNeed]]] = [
        Column("recipe", lambda pair: pair[0].recipe),
        Column("GPUs", lambda pair: str(pair[0].num_gpus), align="right"),
        *(
            Column(name, partial(_gib, name), format=number, align="right", importance=importance)
            for name, importance in parts.items()
        ),
        Column("too small", lambda pair: ", ".join(pair[0].too_small)),
        Column("checkpointed", lambda pair: number(pair[1].total_gib), align="right"),
        Column("too small even so", lambda pair: ", ".join(pair[1].too_small)),
    ]
    if {need.num_gpus for need in needs} == {1}:
        del columns[1]
    heading = (
        "Memory of a GPU with one sample, in GiB, estimated: frozen weights; trained parameters with their"
        " gradients and optimizer states; what the backward pass needs; logits. checkpointed: the total with"
        " --set activation_checkpointing=block. too small: of the GPUs that can run the recipe."
    )
    return "\n".join([filled(heading, width), "", table(pairs, columns, width, rule=True)])


def _gib(part: str, pair: tuple[MemoryNeed, MemoryNeed]) -> float:
    gib: float = getattr(pair[0], f"{part}_gib")
    return gib


def _published(recommendation: Recommendation, lines: Sequence[Choice]) -> Iterator[str]:
    """Yield notes on published speeds of the table's first GPUs."""
    names = (choice.configuration.query.instance.accelerator for choice in lines)
    gpus = dict.fromkeys(gpu.name for name in names if (gpu := identify(name)))
    by_gpu = {speed.gpu: speed for speed in recommendation.published}
    for speed in [by_gpu[gpu] for gpu in gpus if gpu in by_gpu][:_MOST_PUBLISHED]:
        precision = "" if "(" in speed.precision else f" in {speed.precision}"
        yield (
            f"published by {speed.source}: {speed.tokens_per_s:,.0f} tokens/s per GPU for"
            f" {speed.model}{precision} on {speed.gpu}; its FLOPs would be"
            f" {speed.tokens_per_s_by_flops:,.0f} tokens/s of this model"
        )


def _notes(
    recommendation: Recommendation, lines: Sequence[Choice], letters: Labels, *, in_full: bool
) -> list[str]:
    """Return what the table's words mean and what the pick rests on; in full what every line rests on."""
    words = "; ".join(_words(recommendation, lines, in_full=in_full))
    notes = [words] if words else []
    on_one = " on one GPU" if any(choice.configuration.query.num_gpus > 1 for choice in lines) else ""
    for need in recommendation.memory[:1]:
        if need.too_small and not in_full:
            names = ", ".join(need.too_small)
            notes.append(f"too small for {need.recipe}{on_one} ({number(need.total_gib)} GiB): {names}")
    shown = lines if in_full else [choice for choice in lines if choice is recommendation.pick]
    notes += dict.fromkeys(
        f"{price.purchase} prices of {price.as_of} are a third party's: `{UPDATE_COMMAND}`"
        for price in (choice.purchase.price for choice in shown)
        if price.secondary
    )
    for choice in shown:
        total = choice.total
        if total.fee_usd is not None and total.block_hours is not None:
            unused = total.usd.value - total.effective_usd.value
            length = f"{total.block_hours / 24:g} x 24 h"
            notes.append(
                f"the block of {choice.instance} is {length} for ${dollars(total.fee_usd)}, of which this"
                f" training leaves ${dollars(unused)} unused"
            )
    notes += dict.fromkeys(
        text
        for choice in shown
        for text in (choice.configuration.assumption, choice.configuration.rate.assumption)
        if text
    )
    if recommendation.pick and (row := recommendation.pick.configuration.rate.row):
        notes += _trains_as_well(row, letters)
    if recommendation.pick and takes_too_long(recommendation.pick):
        days = MAX_MINUTES // (24 * 60)
        notes.append(
            f"no command: the training may take longer than the {days} days that a job can;"
            f" --deadline {days}d leaves out what does"
        )
    if not in_full:
        return notes
    if lines and not recommendation.job.steps_only:
        notes.append(
            "boot, image pull and start-up are as measured if runs on the instance type have them, else"
            " assumed: `fastlaunch estimate` lists them"
        )
    notes += _published(recommendation, lines)
    reasons = by_reason(
        (
            (
                " on ".join(name for name in (out.recipe, out.instance) if name),
                f"{out.purchase}: {out.reason}" if out.purchase else out.reason,
            )
            for out in recommendation.left_out
            # The table of memory shows it.
            if out.fits is None
        ),
        _MOST_NAMES,
    )
    if reasons:
        more = f"; {len(reasons) - 1} more: --output json" if len(reasons) > 1 else ""
        notes.append(f"left out: {reasons[0]}{more}")
    return notes


def _trains_as_well(row: Row, letters: Labels) -> Iterator[str]:
    """Yield that the row trains as well as its reference, if that was found, and for how long."""
    convergence = row.validity.convergence
    if convergence.verdict == WITHIN and convergence.end is not None:
        name = letters(row.setup.known_recipe or row.setup.recipe)
        yield (
            f"{name} learns as {convergence.reference} does for {convergence.end.step:,} steps: held-out loss"
            f" within {MARGIN:.0%} of what that learnt, by {convergence.num_pairs} pairs of runs"
        )


def _words(recommendation: Recommendation, lines: Sequence[Choice], *, in_full: bool) -> Iterator[str]:
    """Yield what the words of the table mean; if not in full, the classes together."""
    rates = [choice.configuration.rate for choice in lines]
    if any(rate.evidence == Evidence.SAME_GPU for rate in rates):
        yield f"{Evidence.SAME_GPU}: in another machine"
    classes = sorted({rate.prediction_class for rate in rates if rate.prediction_class})
    if in_full:
        yield from (f"class {name}: {CLASS_MEANINGS[name]}" for name in classes)
    elif classes:
        yield f"class {', '.join(classes)}: predicted"
    notes = {_note(choice, recommendation, in_full=in_full) for choice in lines}
    meanings = {**_NOTES, "over": f"may exceed {_limits(recommendation.limits)}"}
    yield from (f"{note}: {meaning}" for note, meaning in meanings.items() if note in notes)
    if any(choice.configuration.query.num_parts > 1 for choice in lines):
        yield "/N: batch in N parts"


def to_json(recommendation: Recommendation) -> dict[str, Any]:
    """Return the recommendation as plain data; docs/reference.md describes it."""
    job, even, experiment = recommendation.job, recommendation.break_even, recommendation.experiment
    return {
        "schema": 1,
        **fields_to_json(job, "workload", "samples"),
        "sample_unit": job.like.setup.sample_unit,
        "steps_only": job.steps_only,
        **fields_to_json(recommendation.limits, "deadline_hours", "budget_usd"),
        "sentence": sentence(recommendation),
        "why": " ".join(why(recommendation)) or None,
        **{
            name: choice and choice_json(choice)
            for name in ("pick", "runner_up", "cheapest_measured")
            for choice in [getattr(recommendation, name)]
        },
        "not_settled": (rival := recommendation.rival)
        and {"choice": choice_json(rival.choice), **fields_to_json(rival, "usd", "hours")},
        "probability_cheapest": recommendation.chance,
        "break_even": even
        and {
            **fields_to_json(even, "instance", "usd_per_hour"),
            "other": fields_to_json(even.other.configuration, "instance", "recipe"),
        },
        "front": [choice_json(choice) for choice in recommendation.front],
        "by_instance": [choice_json(choice) for choice in recommendation.by_instance],
        "by_purchase": [choice_json(choice) for choice in recommendation.by_purchase],
        "num_candidates": recommendation.num_choices,
        "num_within_limits": recommendation.num_within,
        "left_out": [fields_to_json(out, *vars(out)) for out in recommendation.left_out],
        "next_experiment": experiment
        and {
            **{
                name: choice_json(experiment.choice)[name]
                for name in ("instance", "num_nodes", "recipe", "batch_size_per_gpu", "purchase", "region")
            },
            **fields_to_json(experiment, "usd", "hours", "probability", "saves_usd", "command"),
        },
        "memory": [fields_to_json(need, *vars(need)) for need in recommendation.memory],
        "published": [vars(speed) for speed in recommendation.published],
        "command": recommendation.command,
        "build_command": recommendation.build,
        "warnings": list(recommendation.warnings),
    }


def as_rows(recommendation: Recommendation) -> list[dict[str, Any]]:
    """Return a row for each choice of the front and the cheapest on each type, the cheapest first."""
    front = {id(choice) for choice in recommendation.front}
    chosen = {id(choice): choice for choice in (*recommendation.front, *recommendation.by_instance)}
    if recommendation.runner_up is not None:
        chosen[id(recommendation.runner_up)] = recommendation.runner_up
    return [
        {
            **choice_json(choice),
            "pick": choice is recommendation.pick,
            "runner_up": choice is recommendation.runner_up,
            "front": id(choice) in front,
        }
        for choice in sorted(chosen.values(), key=lambda choice: (choice.usd, choice.hours))
    ]


def choice_json(choice: Choice) -> dict[str, Any]:
    """Return the choice as plain data."""
    configuration, whole, price = choice.configuration, choice.total, choice.purchase.price
    return {
        "instance": configuration.instance,
        "num_nodes": configuration.query.num_nodes,
        "recipe": configuration.recipe,
        "batch_size_per_gpu": configuration.query.batch_size_per_gpu,
        "global_batch": configuration.global_batch,
        "purchase": price.purchase,
        "region": price.region,
        "usd_per_hour": choice.purchase.paid_usd_per_hour,
        "block_hours": whole.block_hours,
        "unused_usd": None if whole.fee_usd is None else whole.usd.value - whole.effective_usd.value,
        "price_as_of": price.as_of.isoformat(),
        "price_secondary": price.secondary,
        "usd": whole.usd.value,
        "usd_low": whole.usd.low,
        "usd_high": whole.usd.high,
        "hours": whole.hours.value,
        "hours_low": whole.hours.low,
        "hours_high": whole.hours.high,
        "shared_by": list(configuration.rate.row.shared_by) if configuration.rate.row else [],
        **rate_to_json(configuration.rate),
        "usd_per_million_tokens": choice.usd_per_million_tokens,
        "assumption": configuration.assumption or configuration.rate.assumption,
    }
