"""Which test runs which command of the documents, and how. `python tests/docs/commands.py` prints it as Markdown.

A command that is in no row of WAYS fails test_documents.py, and so does a row whose command is in no document.
"""

from __future__ import annotations

from dataclasses import dataclass

from documents import commands


@dataclass(frozen=True)
class Way:
    """test: that takes the command from here, fills in paths and runs it. how: what it does with it.

    rest: where that is less than the whole command, what stands for the rest.
    """

    test: str
    how: str
    rest: str = ""


AS_IT_IS = "as it is, to its end"
FIRST_VERSION = "as it is, stopped by Ctrl-C when version 1 is published"
DRY = "with --dry-run added, as one of its ranks, CUDA faked"
PARSED = "its words are taken by its parser"

HERE = "tests/docs/test_commands.py"
RUNS = "tests/docs/test_whole_runs.py"
PRINTS = Way(f"{HERE}::test_a_command_does_what_it_says", AS_IT_IS)
ON_A_RUN = Way("tests/integration/test_default_run.py::test_commands_on_a_run_are_as_they_are_written", AS_IT_IS)
VIEWED = Way(
    "tests/look/test_server.py::test_the_documents_commands_view_a_run",
    "as it is, of a made-up run; a server is stopped by Ctrl-C",
    "its pages: tests/look/test_browser.py",
)
OWN_MODEL = Way(
    f"{RUNS}::test_a_model_of_ones_own_is_trained",
    FIRST_VERSION,
    "to the end, smaller and with our own engine: tests/integration/test_bring_your_own.py",
)
DEFAULT_RUN = Way(
    "tests/integration/test_default_run.py::test_the_default_run_starts_as_it_is_written",
    FIRST_VERSION + ", from a policy that is in the cache",
    "the warm start and the end, smaller: the other tests of this file",
)
OTHER_TEAM = Way(
    f"{HERE}::test_another_team_passes_its_checks",
    "with --dry-run added",
    "to the end, smaller and scripted: tests/integration/test_scripted_team.py",
)
MINIATURE = Way(
    "tests/integration/test_miniatures.py::test_a_miniature_trains_every_policy_that_it_has",
    "to its end, three steps from a short warm start",
    "the whole of it: measured by hand",
)
SEARCH_MINIATURE = Way(
    "tests/integration/test_miniatures.py::test_the_search_team_in_miniature_trains_by_its_outcome",
    "to its end, three steps from a short warm start",
    "the whole of it: measured by hand",
)
DUAL_MINIATURE = Way(
    "tests/integration/test_miniatures.py::test_the_dual_system_in_miniature_trains_by_its_outcome",
    "to its end, three steps from a short warm start",
    "the whole of it: measured by hand",
)
QUESTIONS = Way(
    f"{HERE}::test_a_search_team_passes_its_checks",
    "with --dry-run added",
    "to the end, smaller and scripted: tests/integration/test_scripted_team.py",
)
OUR_MODEL = Way(f"{RUNS}::test_a_team_is_evaluated", AS_IT_IS)
ALONE = "tests/docs/test_evaluate_alone.py"
KEPT = Way(
    f"{ALONE}::test_evaluations_are_kept_and_compared",
    "to its end, with our own engine, short completions and one Verifier call",
    "the defaults: tests/docs/test_whole_runs.py::test_a_team_is_evaluated",
)
COMPARED = Way(f"{ALONE}::test_evaluations_are_kept_and_compared", "as it is, on what the evaluations left")
GPUS = Way(
    f"{HERE}::test_a_run_on_gpus_passes_its_checks",
    DRY,
    "vLLM's and Megatron's configs: tests/plan/test_presets.py; the rest needs GPUs",
)
IN_A_BOX = Way(
    "tests/cluster/test_cluster.py::test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone",
    "as it is, on hosts made of namespaces, with fewer ranks",
    "all the rest of docs/clusters.md: make cluster",
)
MODULE = Way(
    f"{HERE}::test_a_program_is_found_by_its_module",
    "with --help added",
    "from a wheel, two steps: tests/test_wheel.py",
)
NEVER = "nothing: measured by hand"


def bench(rest: str) -> Way:
    return Way(f"{HERE}::test_a_benchmark_takes_its_words", PARSED, rest)


def make(rest: str) -> Way:
    return Way(f"{HERE}::test_make_runs_commands_that_are_tested", "make -n: the commands that it runs", rest)


RUN_PY = bench(
    "with --quick: tests/benchmarks/test_benchmarks.py::test_a_quick_run_compares_judges_and_measures_memory"
)
SUITE = bench("with --quick and --only: tests/benchmarks/test_gpu_suite.py::test_the_suite_goes_its_way_on_a_cpu")
STEP = bench(
    "a tiny model: tests/benchmarks/test_benchmarks.py::test_a_step_on_two_ranks_is_that_of_megatron_and_of_the_reference"
)
SIMULATED = bench("smaller: tests/simulation/test_simulation.py")
PLAYED = bench(NEVER)
SYNC = bench("8 MiB: tests/simulation/test_commands.py::test_weights_are_synced_by_every_backend")
PROBE = bench(
    "two syncs of one model: tests/benchmarks/test_benchmarks.py::test_the_probe_lets_honest_syncs_pass; what it notices, with "
    "our own engine: tests/megatron/test_comparison_notices.py"
)
OWN = "torchrun trainer/main.py task=math policies.main.model=%s data.train=problems.jsonl"
QA = "torchrun trainer/main.py task=qa policies.main.model=/path/to/model"
MIXED = (
    "torchrun trainer/main.py task=math policies.main.model=/path/to/model "
    '"data.train=[{path: problems.jsonl, weight: 3}, {path: aime25.jsonl, weight: 1}]"'
)
ON_GPUS = "policies.main.model=/models/%s data.train=problems.jsonl"

WAYS = {
    "make install": make("to its end, with stand-ins for the wheels: tests/install/test_install.py"),
    "make lock": make("what it made: tests/install/test_locks.py"),
    "make test-triton": make("some of it: tests/kernels/test_other_triton.py"),
    "make train": make("its torchrun line: the row of `torchrun trainer/main.py`"),
    "make test": make("it is what runs these tests"),
    "make bench": make("rows of the benchmarks"),
    "make cluster": make("tests/cluster/all_cases.py, whose beginning is tests/cluster/test_cluster.py"),
    "make parity": make(
        "four layouts: tests/megatron/test_parity.py::test_four_ranks_train_as_one_and_as_transformers"
    ),
    OWN % "/path/to/Qwen3-0.6B": OWN_MODEL,
    OWN % "/models/Qwen3-0.6B": OWN_MODEL,
    OWN % "/path/to/model": OWN_MODEL,
    "torchrun trainer/main.py": DEFAULT_RUN,
    "torchrun trainer/main.py orchestration=solver": OTHER_TEAM,
    "torchrun trainer/main.py orchestration=solver_verifier credit.normalise=agent": OTHER_TEAM,
    "torchrun trainer/main.py orchestration=debate orchestration_options.rounds=2": OTHER_TEAM,
    "torchrun trainer/main.py orchestration=team.py:Checked": OTHER_TEAM,
    "torchrun trainer/main.py --config own_team.yaml": DEFAULT_RUN,
    "torchrun trainer/main.py preset=cpu_solver_verifier": MINIATURE,
    "torchrun trainer/main.py preset=cpu_solver_verifier agents.verifier.policy=solver": MINIATURE,
    "torchrun trainer/main.py preset=cpu_solver_verifier policies.solver.shape=cpu_default": MINIATURE,
    "torchrun trainer/main.py preset=cpu_solver_verifier orchestration=solver": MINIATURE,
    "torchrun trainer/main.py preset=cpu_search_team": SEARCH_MINIATURE,
    "torchrun trainer/main.py preset=cpu_dual_system": DUAL_MINIATURE,
    "torchrun trainer/main.py --config own_task.yaml": OTHER_TEAM,
    "python -m marsrl.trainer.main": MODULE,
    "torchrun -m marsrl.trainer.main": MODULE,
    "python trainer/main.py --dry-run task=math ...": PRINTS,
    "python trainer/main.py --dry-run rollout.group_size=16": PRINTS,
    "marsrl doctor": PRINTS,
    "marsrl try task=qa rollout.group_size=2": PRINTS,
    "marsrl try task=qa orchestration=dual_system rollout.group_size=2": PRINTS,
    "marsrl make-facts /tmp/facts": PRINTS,
    "marsrl make-facts /tmp/papers about=papers": PRINTS,
    'marsrl tool search "the home of lotte holt"': PRINTS,
    """marsrl tool scholar '{"queries": ["sparse lattices", "papers of 1997"]}' tools.scholar.top_k=2""": PRINTS,
    MIXED: Way(
        f"{HERE}::test_several_files_pass_their_checks",
        "with --dry-run added",
        "drawn, killed and resumed: tests/integration/test_scripted_team.py",
    ),
    QA: QUESTIONS,
    "torchrun trainer/main.py task=qa orchestration=dual_system policies.main.model=/path/to/model"
    " credit.balance=uniform credit.denominator=agent loss.aggregation=sequence": QUESTIONS,
    f"{QA} data.train=questions.jsonl tools.search.corpus=corpus.jsonl": QUESTIONS,
    "marsrl join node0": Way(
        f"{HERE}::test_a_host_waits_for_its_trainer_and_says_so",
        "as it is, on this machine, without waiting for a trainer that is not there",
        "hosts that join, are lost and leave: tests/engines/test_join.py",
    ),
    "torchrun --nnodes 2 --node-rank N --master-addr host1 --nproc-per-node 8 trainer/main.py --config "
    "/mnt/cluster/run.yaml": IN_A_BOX,
    "marsrl join host1": IN_A_BOX,
    "marsrl serve-retrieval --corpus wiki-18.jsonl --index wiki-18.sqlite": Way(
        f"{HERE}::test_documents_are_served_until_ctrl_c",
        "as it is, at any free port, stopped by Ctrl-C",
        "what it answers: tests/tools/test_retrieval_server.py",
    ),
    "marsrl try --config own_team.yaml rollout.group_size=2": PRINTS,
    "marsrl try --config own_seeker.yaml rollout.group_size=2": PRINTS,
    "marsrl try --config own_task.yaml orchestration=solver rollout.group_size=4": PRINTS,
    "python trainer/main.py --dry-run --config own_task.yaml": PRINTS,
    "marsrl try orchestration=debate rollout.group_size=2": PRINTS,
    "marsrl try orchestration=team.py:Checked rollout.group_size=2": PRINTS,
    "marsrl init --shape tiny --tokenizer bytes /tmp/tiny": PRINTS,
    "marsrl init --shape tiny --tokenizer facts /tmp/facts-model": PRINTS,
    "marsrl evaluate task=math policies.main.model=/path/to/Qwen3-0.6B data.eval=problems.jsonl": OUR_MODEL,
    "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B data.eval=aime25.jsonl": OUR_MODEL,
    "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B "
    '"data.eval=[aime25.jsonl, {path: beyondaime.jsonl, repeat: 4}]" evaluate.repeat=2 --out evaluations/base': KEPT,
    "marsrl evaluate task=math policies.main.model=/models/trained data.eval=aime25.jsonl --out evaluations/trained "
    '"policies.other={frozen: true, model: /models/Qwen3-30B-A3B-Thinking-2507}" agents.solver.policy=other': KEPT,
    "marsrl compare evaluations/base evaluations/trained --html compare.html": COMPARED,
    "marsrl compare runs/one runs/two --html compare.html": COMPARED,
    "marsrl curate raw.jsonl --out curated": PRINTS,
    "marsrl curate raw.jsonl --out curated curate.level.field=level 'curate.level.keep=[graduate, phd]'": PRINTS,
    "marsrl curate raw.jsonl --out curated curate.near_duplicates.threshold=0.9": PRINTS,
    "marsrl curate raw.jsonl --out curated --config curation.yaml task=math": Way(
        f"{RUNS}::test_problems_are_curated",
        "as it is, to its end, with our own engine and a script in place of the server",
        "its parts: tests/curate/",
    ),
    **{
        f"marsrl try --config examples/{name}/run.yaml rollout.group_size={size}": Way(
            "tests/docs/test_examples.py::test_an_example_is_tried", AS_IT_IS
        )
        for name, size in (("own_task", 4), ("own_team", 2), ("own_prompts", "2 --prompts"))
    },
    **{
        f"python trainer/main.py --config examples/{name}/run.yaml": Way(
            "tests/docs/test_examples.py::test_an_example_trains",
            "until its first agent is trained, with a model that says 7 or 8",
        )
        for name in ("gsm8k", "own_task", "own_team", "own_prompts")
    },
    **{
        f"marsrl try {words} rollout.group_size=2": Way(f"tests/docs/test_examples.py::{test}", AS_IT_IS)
        for words, test in (
            ("orchestration=examples/recipes/critic.py:Critic", "test_a_critic_is_paid_for_what_comes_of_its_critique"),
            ("orchestration=examples/recipes/workers.py:Workers", "test_workers_have_prompts_and_groups_of_their_own"),
            (
                "orchestration=examples/recipes/guessing.py:Guessing credit.reward_scheme=outcome",
                "test_a_game_ends_when_it_is_won",
            ),
            ("task=qa orchestration=examples/recipes/library.py:Library", "test_a_reader_reads_what_a_tool_found"),
        )
    },
    "marsrl prompts": PRINTS,
    "marsrl prompts math": PRINTS,
    "marsrl config": PRINTS,
    "marsrl config --origin": PRINTS,
    "marsrl config --explain rollout.segments": PRINTS,
    "marsrl config --markdown": PRINTS,
    "marsrl completion bash": PRINTS,
    "marsrl init --from-run runs/NAME my.yaml": Way(
        f"{HERE}::test_a_run_s_settings_become_a_file", "as it is, on a directory that has only config.yaml"
    ),
    "marsrl evaluate runs/NAME": Way(ON_A_RUN.test, "with our own engine and four problems"),
    "marsrl report runs/NAME": ON_A_RUN,
    "marsrl report runs/cpu_default-20260101-120000": ON_A_RUN,
    "marsrl view runs/NAME": VIEWED,
    "marsrl view runs/NAME --text": VIEWED,
    "marsrl view runs/cpu_default-20260101-120000": VIEWED,
    "marsrl export runs/NAME /models/trained": ON_A_RUN,
    "marsrl export runs/cpu_default-20260101-120000 /models/trained": ON_A_RUN,
    "python benchmarks/head_by_formula.py": Way(f"{HERE}::test_the_tables_of_the_head_are_printed", AS_IT_IS),
    "marsrl plan --config configs/qwen3_30b_a3b.yaml --gpus 64 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/qwen3_30b_a3b_8xh100.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/qwen3_8b.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/qwen3_8b.yaml --gpus 8 --gpu a100-80g --response 8192 --json plan.json": PRINTS,
    "marsrl plan --config configs/single_gpu.yaml --gpus 1 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/drmas_math.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/ulorl.yaml --gpus 64 --gpu h100-80g": PRINTS,
    "torchrun --nnodes 3 --node-rank N --master-addr FIRST --nproc-per-node 8 trainer/main.py "
    f"--config configs/ulorl.yaml {ON_GPUS % 'Qwen3-30B-A3B-Thinking-2507'}": GPUS,
    "marsrl plan --config configs/drmas_search.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/mars_qwen3_8b.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "marsrl plan --config configs/mars_qwen2.5_7b.yaml --gpus 8 --gpu h100-80g": PRINTS,
    "torchrun --nnodes 3 --node-rank N --master-addr FIRST --nproc-per-node 8 trainer/main.py "
    f"--config configs/qwen3_30b_a3b.yaml {ON_GPUS % 'Qwen3-30B-A3B-Thinking-2507'}": GPUS,
    "torchrun --nproc-per-node 4 trainer/main.py --config configs/qwen3_30b_a3b_8xh100.yaml "
    f"{ON_GPUS % 'Qwen3-30B-A3B-Thinking-2507'}": GPUS,
    f"torchrun --nproc-per-node 4 trainer/main.py --config configs/qwen3_8b.yaml {ON_GPUS % 'Qwen3-8B'}": GPUS,
    f"torchrun --nproc-per-node 4 trainer/main.py --config configs/drmas_math.yaml {ON_GPUS % 'Qwen3-8B'}": GPUS,
    f"torchrun --nproc-per-node 4 trainer/main.py --config configs/drmas_search.yaml {ON_GPUS % 'Qwen2.5-7B'}": GPUS,
    f"torchrun --nproc-per-node 4 trainer/main.py --config configs/mars_qwen3_8b.yaml {ON_GPUS % 'Qwen3-8B'}": GPUS,
    f"torchrun --nproc-per-node 4 trainer/main.py --config configs/mars_qwen2.5_7b.yaml {ON_GPUS % 'Qwen2.5-7B-Instruct'}": GPUS,
    "torchrun --nproc-per-node 4 trainer/main.py --config mars.yaml": GPUS,
    f"python trainer/main.py --config configs/single_gpu.yaml {ON_GPUS % 'Qwen3-1.7B'}": GPUS,
    "python docs/papers.py": Way("tests/docs/test_papers.py::test_the_command_writes_the_page", "as it is, on a copy"),
    "python benchmarks/learning.py --seeds 0 1 2": PLAYED,
    "python benchmarks/learning.py preset=cpu_solver_verifier --seeds 0 1 2": PLAYED,
    "python benchmarks/learning.py preset=cpu_solver_verifier policies.solver.shape=cpu_default --seeds 1 2": PLAYED,
    "python benchmarks/learning.py preset=cpu_search_team --seeds 0 1": PLAYED,
    "python benchmarks/learning.py preset=cpu_dual_system": PLAYED,
    "python benchmarks/evidence.py": bench(
        "its page: tests/benchmarks/test_evidence.py::test_the_page_is_made_of_the_results_that_are_there"
    ),
    "python benchmarks/evidence.py --run": bench(
        "what it trains: tests/benchmarks/test_evidence.py::test_what_is_there_is_not_trained_again_and_a_dirty_tree_is_refused"
    ),
    "python benchmarks/evidence.py --run --jobs 2 --only drmas": PLAYED,
    "python benchmarks/evidence.py --smoke": PLAYED,
    "python benchmarks/learning.py rollout.segments=2 --seeds 0 1 2": PLAYED,
    "python benchmarks/run.py linear_policy_loss": RUN_PY,
    "python benchmarks/run.py linear_policy_loss --all": RUN_PY,
    "python benchmarks/run.py --all --json out.json": RUN_PY,
    "python benchmarks/run.py group_advantage mpt_gate --quick": RUN_PY,
    "python benchmarks/run.py linear_policy_loss --base HEAD~3": bench(
        "a made-up repository: tests/benchmarks/test_benchmarks.py::"
        "test_ours_of_another_revision_is_built_and_timed_in_turns_with_this_one"
    ),
    "python benchmarks/gpu_suite.py": SUITE,
    "python benchmarks/gpu_suite.py --out results --wheels wheels": SUITE,
    "python benchmarks/gpu_suite.py --device cpu --quick --out dry_run": SUITE,
    "python benchmarks/collect_wheels.py --to wheels": bench(
        "without a download: tests/benchmarks/test_gpu_suite.py::test_what_travels_is_what_was_imported_and_somebody_requires"
    ),
    "python benchmarks/train_step.py": STEP,
    "python benchmarks/step_parts.py": bench(
        "a tiny model: tests/benchmarks/test_benchmarks.py::test_the_parts_of_a_step_are_all_of_it"
    ),
    "python benchmarks/train_step.py --layout tensor=2 expert=2 --repeats 2 --no-dmmpt": STEP,
    "python benchmarks/rollout.py": PLAYED,
    "python benchmarks/pipeline.py --simulate": SIMULATED,
    "python benchmarks/pipeline.py --simulate --scale 8": SIMULATED,
    "python benchmarks/pipeline.py --simulate --full --json docs/pipeline_simulation.json --picture "
    "docs/pipeline_simulation_idle.png": SIMULATED,
    "python benchmarks/curate.py": bench(
        "2,000 rows: tests/benchmarks/test_benchmarks.py::test_planted_near_duplicates_are_found"
    ),
    "python benchmarks/curate.py --rows 100000": bench(
        "2,000 rows: tests/benchmarks/test_benchmarks.py::test_planted_near_duplicates_are_found"
    ),
    "python benchmarks/view.py": bench("2,000 samples: tests/look/test_catalog.py::test_the_benchmark_measures"),
    "python benchmarks/scale.py": bench(
        "4 problems: tests/simulation/test_scale.py::test_twice_the_samples_take_twice_the_work_and_bytes"
    ),
    "python benchmarks/read_pages.py": bench(
        "6 questions: tests/tools/test_pages.py::test_pages_longer_than_a_bin_are_read_side_by_side"
    ),
    "python benchmarks/python_tool.py": bench("4 calls: tests/tools/test_python.py::test_the_benchmark_measures"),
    "python benchmarks/probe.py": PROBE,
    "python benchmarks/probe.py --honest 200": PROBE,
    "python benchmarks/weight_sync.py": SYNC,
    "python benchmarks/weight_sync.py --mib 256 --repeats 5": SYNC,
    "python tests/chaos.py --minutes 20 --seed 7": Way(
        "tests/integration/test_chaos.py::test_two_faults_cost_nothing", "two faults of two kinds, with our own engine"
    ),
}


def run_by(test: str) -> list[str]:
    """The commands that this test function runs."""
    return [command for command, way in WAYS.items() if way.test.rpartition("::")[2] == test]


def table() -> str:
    """Markdown: a row a command, in the order of the documents."""
    places: dict[str, list[str]] = {}
    for found in commands():
        places.setdefault(found.text, []).append(found.where)
    lines = ["| command | where | how it is run | by | what stands for the rest |", "|---|---|---|---|---|"]
    for command, where in places.items():
        way = WAYS[command]
        lines.append(f"| `{command}` | {', '.join(where)} | {way.how} | `{way.test}` | {way.rest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
