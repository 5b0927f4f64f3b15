"""Write what the commands print to a folder, so that `diff -r` shows what a change of structure changed.

usage: python tests/freeze.py FOLDER, from the root of the repository. Prices and dry runs depend on the day:
compare two folders of one day. The commands are read-only, offline, and over the measurements that ship.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = ROOT / "tests" / "plans" / "lines.txt"
DAY = "--prices-as-of 2026-11-21"
NEED = "--workload vit-huge --samples 100M"
FP8 = "--recipe 'fp8-fused dgrad_accumulation=fast last_block=class_token weight_cast=optimizer'"
VIEWS = {
    "job.schema.json": "submit --job-schema",
    "compare.json": f"compare {DAY} --output json",
    "compare.csv": f"compare {DAY} --output csv",
    "compare.txt": f"compare {DAY} --all",
    "compare-vit-huge.txt": f"compare {DAY} workload=vit-huge",
    "compare-finish.txt": f"compare {DAY} workload=vit-huge --finish 195313",
    "compare-target.txt": f"compare {DAY} workload=vit-huge --target loss=1.0",
    "recommend.txt": f"recommend {NEED} {DAY}",
    "recommend.json": f"recommend {NEED} {DAY} --output json",
    "recommend-deadline.txt": f"recommend {NEED} {DAY} --deadline 48h",
    "recommend-measured.json": f"recommend {NEED} {DAY} --measured-only --output json",
    **{
        f"estimate-{instance}.{suffix}": f"estimate {NEED} {DAY} --instance {instance} {options} {output}"
        for instance, options in (
            ("p5.48xlarge", ""),
            ("p5.4xlarge", FP8),
            ("g6e.xlarge", ""),
            ("ml.p5.48xlarge", ""),
        )
        for suffix, output in (("txt", ""), ("json", "--output json"))
    },
    "report.json": f"report {DAY} --format json",
    "report.csv": f"report {DAY} --format csv",
    "report.md": f"report {DAY} --format md",
    "runs.json": "runs list --output json",
    "runs.txt": "runs list",
    "prices.json": "prices --output json",
    "prices.txt": "prices",
    "recipes.txt": "recipes",
    "experiments.txt": "experiments",
    "sweep.txt": "sweep --instance p5.48xlarge,g6e.xlarge --recipe bf16,te-fp8 --workload vit-huge"
    " --max-cost 500 --repeats 3 --dry-run",
}
SCRIPT = "import fastlaunch_train as fl\n\nfor batch in fl.steps(range(9)):\n    pass\n"
JOB = "instance: p5.48xlarge\nrecipe: [bf16, te-fp8]\nrepeats: 2\nmax-hours: 1\ntag:\n  team: vision\n"
#: What differs between two runs of one commit: the times of an import, a word while one waits, the commit.
STAMPS = re.compile(
    r'^ *"(created_at|submission)": .*\n|^\nmaking the report\n|(?<=FASTLAUNCH_COMMIT=)\w+', re.MULTILINE
)


def main(folder: Path) -> None:
    """Write a file per command below the folder."""
    with tempfile.TemporaryDirectory() as temporary:
        home, repository = Path(temporary, "home"), Path(temporary, "repository")
        environment = dict(os.environ) | {"FASTLAUNCH_HOME": str(home), "COLUMNS": "120", "TZ": "UTC"}

        def output_of(line: str, cwd: Path = ROOT) -> str:
            command = [str(Path(sys.executable).with_name("fastlaunch")), *shlex.split(line)]
            done = subprocess.run(
                command, check=False, env=environment, cwd=cwd, capture_output=True, text=True
            )
            text = done.stdout + (f"\n{done.stderr}" if done.stderr else "")
            return text.replace(temporary, "TEMPORARY") + (
                f"exit {done.returncode}\n" if done.returncode else ""
            )

        output_of("runs import train/measurements")
        output_of("runs import --published")
        _commit_a_script(repository)
        commands = re.findall(r"^  ([a-z]+)  ", output_of("--help"), re.MULTILINE)
        pages = [
            *commands,
            *(f"runs {verb}" for verb in ("list", "show", "import", "export", "push", "pull", "rm")),
        ]
        work: dict[Path, tuple[str, Path]] = {Path("help", page): (f"{page} --help", ROOT) for page in pages}
        work |= {Path(name): (line, ROOT) for name, line in VIEWS.items()}
        for line in LINES.read_text().splitlines():
            name, options = line.split(maxsplit=1)
            before, dashes, command = options.partition(" -- ")
            for suffix, show in (("txt", ""), ("request", " --show request")):
                if not show or "--local" not in before:
                    typed = f"submit {before} --dry-run{show}{dashes}{command}"
                    work[Path("plan", f"{name}.{suffix}")] = (typed, repository)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outputs = pool.map(lambda item: output_of(*item), work.values())
            for path, text in zip(work, outputs, strict=True):
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(STAMPS.sub("", text))


def _commit_a_script(repository: Path) -> None:
    repository.mkdir()
    Path(repository, "train.py").write_text(SCRIPT)
    Path(repository, "job.yaml").write_text(JOB)
    identity = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    stamps = {f"GIT_{who}_DATE": "2026-11-21T12:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    for line in ("git init --quiet", "git add .", "git commit --quiet --message script"):
        subprocess.run(line.split(), cwd=repository, check=True, env=dict(os.environ) | identity | stamps)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
