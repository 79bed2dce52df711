"""Mapping of the documents' commands to the tests that run them."""

from __future__ import annotations

import re
from functools import cache

from documents import commands

TESTS = (
    ("make .*", "test_make_runs_commands_that_are_tested"),
    ("python -m pytest .*", "test_one_file_of_tests_runs"),
    ("python benchmarks/.*", "test_a_benchmark_takes_its_words"),
    ("python docs/papers.py", "test_the_command_writes_the_page"),
    ("python tests/chaos.py .*", "test_four_faults_cost_nothing"),
    (".* -m marsrl.trainer.main", "test_a_program_is_found_by_its_module"),
    ("marsrl (plan|tool) .*|.* --dry-run .*", "test_a_command_does_what_it_says"),
    (
        ".* --config /mnt/cluster/run.yaml|ray start --address=host1.*",
        "test_two_hosts_train_as_one_and_name_a_lost_host",
    ),
    ("ray get-auth-token .*", "test_joining_a_cluster_needs_its_token"),
    ("(python|marsrl) .*examples/(guess_number|real_team)/.*", "test_an_example_for_a_small_model_passes_its_checks"),
    ("marsrl try --config examples/.*", "test_an_example_is_tried"),
    ("marsrl try .*/critic.py.*", "test_a_critic_is_paid_for_what_comes_of_its_critique"),
    ("marsrl try .*/workers.py.*", "test_workers_have_prompts_and_groups_of_their_own"),
    ("marsrl try .*/guessing.py.*", "test_a_game_ends_when_it_is_won"),
    ("marsrl try .*/library.py.*", "test_a_reader_reads_what_a_tool_found"),
    ("docker (build|run) .*", "test_every_docker_command_of_the_documents_is_checked"),
    ("pip (wheel|install) .*", "test_a_wheel_has_the_presets_and_trains"),
    ("python -m venv /tmp/release .*", "test_a_release_is_built_and_checked"),
    ("python -m venv .*", "test_an_environment_has_what_its_programs_import"),
    ("marsrl sft --config examples/.*", "test_a_clerk_is_taught_to_hand_off"),
    (
        "python .* --config examples/(external/(open|lang|text|veri|gym).*|own_environment/(run|league)).yaml",
        "test_a_program_is_trained_and_evaluated",
    ),
    (".* --config examples/teacher/.*", "test_the_teacher_examples_train_a_small_solver"),
    (".* --config examples/.*", "test_an_example_trains"),
    ("(torchrun|python) .* --config (configs/|mars).*", "test_a_run_on_gpus_passes_its_checks"),
    (
        "torchrun .* preset=cpu_solver_verifier policies.solver.shape=cpu_default",
        "test_a_solver_and_a_verifier_of_their_own_sizes_train",
    ),
    ("torchrun .* preset=cpu_solver_verifier.*", "test_another_team_passes_its_checks"),
    ("torchrun .* preset=cpu_adapters", "test_the_five_adapters_in_miniature_train"),
    ("torchrun .* preset=cpu_(search_team|dual_system)", "test_a_team_in_miniature_trains"),
    ("torchrun trainer/main.py", "test_the_default_run_starts_as_it_is_written"),
    ("torchrun .* task=math .* orchestration=solver", "test_another_team_passes_its_checks"),
    ("torchrun .* task=math .* weight: .*", "test_several_files_pass_their_checks"),
    ("torchrun .* task=math .*", "test_a_model_of_ones_own_is_trained"),
    ("torchrun .*", "test_another_team_passes_its_checks"),
    ("marsrl serve-retrieval .*", "test_documents_are_served_until_ctrl_c"),
    ("marsrl (report|export|evaluate|audit) runs/.*", "test_commands_on_a_run_are_as_they_are_written"),
    ("marsrl sft .*", "test_a_command_of_the_documents_teaches"),
    ("python -m .*look.record .*", "test_the_documents_command_records_a_run"),
    ("marsrl view .*", "test_the_documents_commands_view_a_run"),
    ("marsrl (evaluate .* --out|compare) .*", "test_evaluations_are_kept_and_compared"),
    ("marsrl evaluate .*", "test_a_team_is_evaluated"),
    ("marsrl check-answers .*", "test_the_judge_of_a_file_is_tried"),
    ("marsrl curate .* curation.yaml .*", "test_problems_are_curated"),
    ("marsrl fetch .*", "test_fetch_downloads_with_the_settings_of_pip"),
    ("marsrl init --from-run .*", "test_a_run_s_settings_become_a_file"),
    ("marsrl .*", "test_a_command_does_what_it_says"),
)
"""(pattern of a command, its test). The first matching pattern counts."""


@cache
def runner(command: str) -> str | None:
    """Return the command's test; None if no pattern matches."""
    return next((test for pattern, test in TESTS if re.fullmatch(pattern, command)), None)


def run_by(name: str) -> list[str]:
    """Return the commands that this test function runs, in the documents' order."""
    found = dict.fromkeys(each.text for each in commands())
    return [command for command in found if runner(command) == name]
