# ruff: noqa: E501  one line per row of a table
"""Every verb, flag, setting and behaviour of the job manager that this program replaces, and every
fault of it, with the test that covers it here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

MIGRATION = Path(__file__).parents[1]
TESTS = Path(__file__).parents[3] / "tpufleet/tests"

NAMES = (
    "migration/test_former_names.py::test_a_former_spelling_runs_todays_command_or_says_what_to_use"
)
FORMER = "migration/test_former_commands.py"
FLAGS = "migration/test_former_flags.py"
SERVER = "views/test_cli_with_server.py"
ALONE = "views/test_cli_without_server.py"
META = "views/test_job_metadata.py"
PREFERENCES = "views/test_preferences.py"
QUEUE = "views/test_queue.py"
RESERVE = "views/test_reservations.py"
VM = "views/test_vm_fleet.py"
SHELL = "views/test_vm_shell.py"
SHARING = "journeys/test_sharing.py"
ENDINGS = "journeys/test_endings.py"
RECOVERY = "journeys/test_recovery.py"
RETRIES = "policy/test_retries.py"
SIGNATURES = "model/test_failure_signatures.py"
WEB = "web/test_pages.py"
LAB = "web/test_lab.py"
AUTH = "service/test_auth.py"
JOBS = "service/test_jobs.py"
FAILOVER = "journeys/test_controller_failover.py"
LEASES = "contract/test_store_concurrency.py"

# Section and item of the former program; what it did; the test here.
PARITY: tuple[tuple[str, str, str], ...] = (
    # Run and observe
    ("run", "run on a TPU, a type or an alias", f"{SERVER}::test_run_uploads_the_spec_and_the_code"),
    ("run: type", "first free slice of the type", "journeys/test_pools.py::test_jobs_start_by_priority_then_age"),
    ("run: alias", "aliases of TPUs", f"{PREFERENCES}::test_run_uses_aliases_and_directories"),
    ("run: status starting", "starting until the program runs", f"{SERVER}::test_why_explains_the_state"),
    ("check", "state and newest output of each job", f"{FORMER}::test_check_lists_my_jobs"),
    ("check -wdts -nt -c -nf col=N", "layout", f"{FORMER}::test_the_layout_of_caj_follows_from_the_terminal"),
    ("check USER", "of another user", f"{FORMER}::test_check_of_another_user_lists_theirs"),
    ("check-simp", "short view", f"{FORMER}::test_check_lists_my_jobs"),
    ("monitor", "refreshed until Ctrl-C", f"{FORMER}::test_monitor_refreshes_until_interrupted"),
    ("caj", "jobs of all users", f"{FORMER}::test_caj_lists_the_jobs_of_everybody"),
    ("maj", "watch jobs of all users; raised TypeError", f"{FORMER}::test_monitor_refreshes_until_interrupted"),
    ("add-tag", "tags of a job", f"{META}::test_tags_notes_name_and_priority_change"),
    ("resume", "from the checkpoint, optionally on another TPU", f"{FLAGS}::test_another_tpu_is_another_type"),
    ("resume: child", "parent and child", f"{SERVER}::test_resume_and_rerun_create_a_child_with_overrides"),
    ("rerun", "from scratch, stage 0", f"{JOBS}::test_resume_keeps_the_checkpoints_and_rerun_gets_new_ones"),
    ("kill", "kill a job", f"{SERVER}::test_cancel_continues_after_a_job_that_cannot_be_cancelled"),
    ("kill TPU", "kill the job on it", f"{FORMER}::test_kill_of_a_tpu_cancels_the_job_on_it"),
    ("kill TPU: leftovers", "end with the job", "agent/test_stopping.py::test_leftover_processes_are_ended_before_the_exit_is_reported"),
    ("kill-remote", "processes end with their job", "agent/test_containment.py::test_a_child_that_leaves_everything_ends_with_a_cancelled_attempt"),
    ("kill-window", "cancel", f"{FORMER}::test_every_spelling_of_kill_cancels_the_job"),
    ("ignore-error", "the state follows from processes", "agent/test_running.py::test_a_signature_in_the_log_of_a_success_is_ignored"),
    ("get-stage-dir", "where the code is", f"{SERVER}::test_show_prints_everything_about_a_job"),
    ("ack", "failures are noticed at once", f"{RECOVERY}::test_a_preempted_attempt_is_retried_without_spending_the_failure_budget"),
    ("clean", "hide ended jobs", f"{SERVER}::test_archive_hides_jobs_and_unarchive_lists_them_again"),
    ("clear, clear-finished, clear-error", "parts of clean; nothing is deleted", "migration/test_former_archive.py::test_the_former_names_of_archive_delete_nothing"),
    ("clear: chain", "jobs that a live one continues are kept", "views/test_cli_with_server.py::test_jobs_that_a_live_job_continues_are_archived_by_name_only"),
    ("-czw, -czj", "no zombies: processes and records end together", "agent/test_stopping.py::test_leftover_processes_are_ended_before_the_exit_is_reported"),
    ("change-ip", "jobs continue when the controller restarts", f"{FAILOVER}::test_workloads_continue_without_a_controller"),
    ("init", "wiped everything without a question; now sets up a project", "views/test_init.py::test_init_replaces_no_config_file_without_permission"),
    # Flags of run
    ("run dir=N", "working directory by number", f"{FLAGS}::test_a_directory_by_number"),
    ("run tag= rule= ssn= -p -pre -n -norm key=value", "options", f"{FLAGS}::test_a_flag_is_todays_option"),
    ("run: wandb_notes, logging.wandb_notes, finetune_config.yml", "notes of the config file", f"{FLAGS}::test_notes_are_those_of_the_config_of_the_program"),
    ("run monitor= -q", "return at once", f"{FLAGS}::test_without_a_monitor_run_returns_at_once"),
    ("run -no-tag -apply -f -auto --log-stage --register user= id=", "not needed", f"{FLAGS}::test_a_flag_that_is_not_needed_is_explained"),
    ("run: v4, v4+, v*", "a free slice of a generation", f"{FORMER}::test_run_takes_a_free_slice_of_a_generation_or_a_slice_by_name"),
    ("run -a, --all", "any free slice", f"{FORMER}::test_run_on_any_free_slice"),
    ("run: full name of a node", "was registered; says how to adopt it", f"{FORMER}::test_run_on_a_node_that_the_server_does_not_know_says_how_to_adopt_it"),
    ("run: name without kmh-tpuvm-", "any prefix may be left out", f"{FORMER}::test_the_prefix_of_a_node_may_be_left_out"),
    ("run: name without kmh-tpuvm- that is not registered", "says how to adopt it", f"{FORMER}::test_a_node_without_its_prefix_that_is_not_here_says_how_to_adopt_it"),
    ("run: value with a second =", "was lost", f"{FLAGS}::test_a_flag_is_todays_option"),
    ("run: unknown name", "says what is known", f"{ALONE}::test_invalid_input_is_reported_with_status_two"),
    # Run sequence
    ("run: reservation of another user", "refused", f"{SHARING}::test_a_reserved_pool_runs_only_jobs_of_its_owner"),
    ("run: disk mounted", "checked at boot", "providers/tpu_vm/test_startup_script.py::test_formatted_disks_are_mounted_and_empty_ones_are_not"),
    ("run: preempted TPU", "created again", f"{RECOVERY}::test_a_slice_lost_before_the_start_costs_no_attempt"),
    ("run: busy chips", "named, never killed", "agent/test_diagnostics.py::test_a_foreign_process_on_the_chips_is_named_and_never_killed"),
    ("run: staging", "code as submitted", f"{SERVER}::test_an_unchanged_folder_keeps_its_digest"),
    # Directories, settings, aliases
    ("set-cur, set-dir, del-dir, swap-dir, ls, get-dir", "directories 1..100", f"{PREFERENCES}::test_directories"),
    ("get-settings, set-settings, reset-settings", "settings", f"{PREFERENCES}::test_values_are_converted_and_checked"),
    ("settings: keys and defaults", "monitor_after_run … time_zone", f"{PREFERENCES}::test_keys_and_defaults_are_those_of_the_former_job_manager"),
    ("setting monitor_after_run", "false: detach", f"{PREFERENCES}::test_run_detaches_when_the_user_has_set_that"),
    ("setting time_zone cn", "was rejected", f"{PREFERENCES}::test_values_are_converted_and_checked"),
    ("settings monitor_tpu, monitor_dir, show_length", "layout of the list", f"{PREFERENCES}::test_settings_of_the_list_of_jobs"),
    ("setting monitor_upd_time", "seconds between two updates", f"{PREFERENCES}::test_a_watch_pauses_for_monitor_upd_time"),
    ("setting monitor_length", "characters of the newest output", f"{PREFERENCES}::test_monitor_length_is_the_number_of_characters_of_the_output"),
    ("setting monitor_verbose", "the newest output in a watch", f"{PREFERENCES}::test_a_watch_shows_output_if_monitor_verbose_is_set"),
    ("tpu_aliases of data.json", "a node that is unknown here is named", "migration/test_data_file.py::test_the_data_of_the_former_job_manager_is_imported"),
    ("reset-window-num, reset-window", "no windows to number: names are unique", f"{SERVER}::test_default_names_are_unique_and_found_by_their_beginning"),
    ("config aliases lr bs ep wd b1 b2 ckpt", "defaults", f"{PREFERENCES}::test_a_default_alias_can_be_changed_deleted_and_restored"),
    # Nodes
    ("apply, reapply, -norm, t=, m=", "create with retries", "migration/test_former_nodes.py::test_former_names_and_spellings_of_apply_and_reapply"),
    ("apply: alias", "the node that it means", "migration/test_former_nodes.py::test_an_alias_of_a_tpu_means_its_node"),
    ("apply: retry", "until there is capacity", f"{VM}::test_create_retries_a_stockout_but_not_an_invalid_request"),
    ("delete", "after a question", f"{VM}::test_delete_requires_confirmation_and_deletes_only_its_workers"),
    ("restart", "stop and start; reported failure always", f"{VM}::test_apply_rejects_a_stopped_node_and_restart_starts_it"),
    ("check-status, describe", "state of a node", f"{VM}::test_life_cycle_of_one_node"),
    ("check-env", "chips that JAX sees", f"{SHELL}::test_check_env_reports_hosts_and_chips"),
    ("check-env: errors", "file error, occupied", f"{SHELL}::test_check_env_recognizes_known_errors"),
    ("mount-disk", "disks and NFS", f"{SHELL}::test_disks_are_attached_once_and_mounted_on_every_host"),
    ("set-wandb", "key never on a command line", f"{SHELL}::test_a_wandb_key_is_installed_on_every_host_and_never_an_argument"),
    ("solve", "repair", f"{SHELL}::test_solve_recreates_a_preempted_node"),
    ("test", "typed lines on every host", f"{SHELL}::test_typed_lines_run_on_every_host"),
    ("lian", "shell on a host", f"{SHELL}::test_lian_opens_a_shell_on_one_host_or_runs_a_command_on_all"),
    # Registry and sheet
    ("add-tpu-alias", "TPU aliases", f"{PREFERENCES}::test_run_uses_aliases_and_directories"),
    ("register, add-applied, rtw, del-registered", "nodes made by hand", "providers/tpu_vm/test_journeys.py::test_a_node_made_by_hand_is_adopted_runs_a_job_and_is_given_back"),
    ("register: never deletes", "also when calls fail", "providers/tpu_vm/test_adoption.py::test_faults_of_the_api_never_delete_it"),
    ("fang, fmd", "an alias for another node", f"{FORMER}::test_an_alias_moves_from_an_old_slice_to_a_new_one"),
    ("keng", "where capacity was granted", f"{FORMER}::test_keng_shows_where_capacity_was_granted"),
    ("zhan", "reserve, 30 minutes by default", f"{RESERVE}::test_reserve_extend_and_release"),
    ("rm-lock", "release", f"{RESERVE}::test_reserve_extend_and_release"),
    ("find", "by type, free, spot or not", f"{RESERVE}::test_types_of_find"),
    ("find -del style=", "layout", f"{FORMER}::test_words_of_find_and_of_the_log_are_dropped_with_a_reason"),
    ("rel", "release", f"{FORMER}::test_zhan_reserves_for_30_minutes_and_is_released"),
    ("ssn, asn", "notes", f"{META}::test_tags_notes_name_and_priority_change"),
    ("uss, gtis, twsi", "the table is observed", f"{RESERVE}::test_the_inventory_has_slices_room_and_notes"),
    ("sheet: running, free", "state and owner", f"{RESERVE}::test_the_inventory_has_slices_room_and_notes"),
    ("sheet: chips by type and zone", "K and L", f"{RESERVE}::test_the_inventory_has_slices_room_and_notes"),
    ("sheet: reserved(error)", "after a failure", f"{SHARING}::test_the_slice_of_a_failed_job_is_held_for_its_owner"),
    # Queue
    ("queue", "jobs wait for a slice", "journeys/test_pools.py::test_jobs_start_by_priority_then_age"),
    ("vq", "list the queue", f"{QUEUE}::test_a_job_is_behind_a_running_one_until_its_time_limit"),
    ("queue types, zones, tpus", "filter", f"{QUEUE}::test_queues_are_filtered"),
    ("dequeue", "remove", f"{QUEUE}::test_remove_cancels"),
    ("dequeue --all, *", "only what waits", f"{FORMER}::test_dequeue_removes_what_waits"),
    ("dqr", "run now", f"{FORMER}::test_the_queue"),
    ("queue pm=XY", "own or others', failed or finished", f"{SHARING}::test_a_job_says_whose_used_slices_it_takes"),
    ("queue pm: free TPU", "free for all", f"{SHARING}::test_a_slice_that_no_job_used_is_free_for_all"),
    ("queue pm= on run", "accepted", f"{FLAGS}::test_the_permission_bits_are_todays_reuse"),
    ("queue: code staged at once", "snapshot at submit", f"{JOBS}::test_a_snapshot_must_be_here_before_the_job_is"),
    ("queue: idle TPU never triggered it", "placement runs when anything changes", f"{SHARING}::test_a_slice_that_no_job_used_is_free_for_all"),
    # Callbacks, buckets, users
    ("upd-log, upd-staging-info, finish-job, fail-job", "agents report", "agent/test_running.py::test_the_phases_are_reported_in_order"),
    ("cp, cc, cca", "checkpoints are read where they are", f"{JOBS}::test_resume_keeps_the_checkpoints_and_rerun_gets_new_ones"),
    ("clean-eu, clean-us", "purge", f"{SERVER}::test_purge_lists_files_and_checkpoints_apart_and_asks"),
    ("add-user, del-user, list-users", "users", f"{SERVER}::test_users_and_tokens_are_created_and_deleted"),
    ("register-web", "token", f"{FORMER}::test_users_and_tokens"),
    ("lock, unlock, rl, lock-data, unlock-data", "no locks: one transaction", f"{LEASES}::test_a_former_holder_cannot_write"),
    ("-smc, -gmc, -agc, -mgc, -Mc, debug-stats, debug-kill", "no MONITOR: events act at once", f"{RECOVERY}::test_a_preempted_attempt_is_retried_without_spending_the_failure_budget"),
    ("-Ml", "what the monitor did", f"{FORMER}::test_the_log_of_the_monitor_is_the_list_of_events"),
    ("-Ml us, cn", "time zone of the settings", f"{FORMER}::test_words_of_find_and_of_the_log_are_dropped_with_a_reason"),
    ("help", "by command", "migration/test_former_names.py::test_help_of_a_command_can_be_asked_for_by_name"),
    ("tldr", "worked examples", "views/test_help_and_completion.py::test_an_example_is_a_valid_command_line"),
    ("trun, tm, tcks, tfind, tvq", "short names: completion", "views/test_help_and_completion.py::test_bash_completes"),
    ("check-rules", "was not dispatched", f"{FORMER}::test_check_rules_shows_the_rules"),
    # Data
    ("data.json", "imported", "migration/test_data_file.py::test_the_data_of_the_former_job_manager_is_imported"),
    ("legacy.json", "archived jobs are all kept", "contract/test_stores.py::test_archived_jobs_are_listed_only_on_request"),
    ("job: stage, wandb_run_id.txt", "TPUFLEET_STAGE, WANDB_RUN_ID", "service/test_heartbeats.py::test_a_resumed_job_continues_its_stage_and_its_run"),
    ("job: start times", "time zone of the reader", "views/test_text.py::test_a_time_has_its_date_unless_it_is_today"),
    # Rules and detection
    ("rules pre, pass, reapply, rerun, resume", "table", f"{RETRIES}::test_the_rules_govern_three_reasons"),
    ("rules: applied", "to jobs", f"{ENDINGS}::test_the_rules_decide"),
    ("rule rerun", "from scratch", f"{ENDINGS}::test_the_rule_rerun_restarts_from_scratch_and_the_others_resume"),
    ("rules: invalid name", "rejected", f"{ALONE}::test_invalid_input_is_reported_with_status_two"),
    ("detection: grpc, locked, OOM, deadline, …", "log corpus", f"{SIGNATURES}::test_every_tail_gets_its_reason"),
    ("detection: the word error", "no evidence", f"{SIGNATURES}::test_the_word_error_alone_is_not_evidence"),
    ("detection: preempted", "state of the provider", "providers/tpu_vm/test_states.py::test_node_state"),
    ("check -v", "with the newest output", f"{FORMER}::test_check_v_shows_the_activity_and_the_newest_output"),
    ("activity: Compiling, Sampling, Running(ep=), Initializing, Staging", "from the newest output, for people only", "views/test_text.py::test_an_activity_is_read_from_the_newest_line_that_names_one"),
    ("activity: Unknown", "no word is shown", "views/test_text.py::test_an_activity_is_read_from_the_newest_line_that_names_one"),
    ("activity: epoch, step", "metrics from the output", "agent/test_progress.py::test_metrics_are_read_from_the_output_of_a_program_that_reports_none"),
    ("finish", "exit status", "policy/test_verdicts.py::test_one_exit_alone"),
    ("resume: load_from", "the latest valid checkpoint", "policy/test_job_step.py::test_the_next_attempt_starts_from_the_latest_valid_checkpoint"),
    ("resume: checkpoint_N", "recognised", "agent/test_progress.py::test_steps_are_parsed_from_checkpoint_names"),
    # Environment
    ("create: runtime version", "by generation", "providers/tpu_vm/test_requests.py::test_the_runtime_follows_the_generation"),
    ("create: spot", "capacity", "providers/tpu_vm/test_requests.py::test_the_capacity_type_sets_the_scheduling_config"),
    ("create: queued resources", "built in", "providers/tpu_vm/test_requests.py::test_queued_capacity_is_a_best_effort_queued_resource_with_a_deadline"),
    ("kill: chips", "freed before the agent starts", "providers/tpu_vm/test_startup_script.py::test_leftover_chip_users_are_killed_before_the_agent_starts"),
    ("wandb: key", "a secret of the job", "agent/test_running.py::test_secrets_are_only_in_the_environment_of_the_program"),
    # Web
    ("web: jobs and logs", "live", f"{WEB}::test_a_job_is_submitted_and_watched_through_a_preemption_to_its_end"),
    ("web: resume, rerun, kill, run", "actions", f"{WEB}::test_a_job_is_cancelled_and_run_again_from_the_page"),
    ("web: clean", "archive; nothing is deleted", f"{LAB}::test_ended_jobs_are_archived_and_listed_again"),
    ("web: login", "link, once", f"{WEB}::test_a_login_link_works_once"),
    ("web: permissions", "by role", f"{WEB}::test_two_users_have_different_rights"),
    ("web: /user/<u>, /log/<u>/<w>, /tpus, /login, /logout", "bookmarks lead to today's page", "migration/test_former_addresses.py::test_a_bookmark_of_the_former_page_leads_to_todays"),
    ("web: /tpus, tpu-status, tpu-gcloud-counts", "inventory page", f"{LAB}::test_notes_in_the_inventory_are_edited"),
    ("web: tpu-fang", "alias of a slice", f"{LAB}::test_notes_in_the_inventory_are_edited"),
    ("web: tpu-keng", "answers by zone", f"{LAB}::test_a_waiting_job_shows_zones_answers_and_prices"),
    ("web: del-registered", "give an adopted node back", f"{LAB}::test_an_adopted_node_is_given_back_by_an_admin"),
    # Faults that must not come back
    ("fault 1: lock without owner", "lease with a token", f"{LEASES}::test_a_former_holder_cannot_write"),
    ("fault 2: lock leaks", "a lease expires", f"{LEASES}::test_a_lease_has_one_holder_at_a_time"),
    ("fault 3: lock held across ssh", "a hanging call blocks nobody", "providers/tpu_vm/test_zone_observer.py::test_a_hanging_zone_does_not_delay_the_listing"),
    ("fault 4: kill of foreign processes", "only those of the attempt", "agent/test_containment.py::test_a_child_that_leaves_everything_ends_with_a_cancelled_attempt"),
    ("fault 5: resume without a checkpoint", "complete ones only", "agent/test_progress.py::test_a_checkpoint_in_a_bucket_counts_once_orbax_has_committed_it"),
    ("fault 5: rerun loads a checkpoint", "new location", f"{JOBS}::test_a_rerun_of_a_job_with_its_own_location_does_not_find_the_old_checkpoints"),
    ("fault 5: unlimited resumes", "crash loop", f"{ENDINGS}::test_a_crash_loop_is_stopped"),
    ("fault 6: quoted GRPC error", "not evidence in a success", "agent/test_running.py::test_a_signature_in_the_log_of_a_success_is_ignored"),
    ("fault 6: remote death writes nothing", "heartbeats", f"{RECOVERY}::test_a_silent_host_ends_the_attempt_only_when_its_slice_is_gone"),
    ("fault 6: no hang detection", "hung", f"{ENDINGS}::test_a_program_without_progress_is_hung"),
    ("fault 7: deleted spot VM", "counts as preempted", f"{RECOVERY}::test_a_spot_slice_deleted_without_notice_counts_as_preempted"),
    ("fault 7: no other zone", "the next zone", "journeys/test_capacity.py::test_the_next_zone_is_tried_at_once"),
    ("fault 8: serial monitor", "zones do not wait for each other", "providers/tpu_vm/test_zone_outages.py::test_a_failing_zone_does_not_delay_the_others"),
    ("fault 9: restart returns nothing", "restart", f"{VM}::test_apply_rejects_a_stopped_node_and_restart_starts_it"),
    ("fault 10: queue frees another TPU", "no slice twice", "policy/test_placement_properties.py::test_no_slice_is_assigned_twice_nor_to_a_job_of_another_pool"),
    ("fault 11: newest history dropped", "records are kept", "contract/test_stores.py::test_pages_have_no_gaps_or_repeats_while_jobs_are_added"),
    ("fault 12: missing region", "any zone of the cloud", f"{VM}::test_a_node_is_applied_for_in_any_zone_of_the_cloud"),
    ("fault 12: zone that does not exist", "named", f"{VM}::test_a_zone_that_the_cloud_does_not_have_is_named"),
    ("fault 12: failed apply", "says why and leaves no node", f"{VM}::test_an_apply_that_fails_says_why_and_leaves_no_node"),
    ("fault 13: wrong time zone", "dates of the reader", "model/test_job_search.py::test_dates_are_in_the_time_zone_of_the_reader"),
    ("fault 14: tmux", "jobs survive the controller", f"{FAILOVER}::test_a_controller_that_dies_after_every_tick_at_this_step_loses_nothing"),
    ("fault 14: prefix collisions", "references", f"{JOBS}::test_a_name_of_several_other_users_is_ambiguous"),
    ("fault 15: v5e runtime", "by generation", "providers/tpu_vm/test_requests.py::test_the_runtime_follows_the_generation"),
    ("fault 15: busy check on v5 and v6", "devices of every generation", "agent/test_diagnostics.py::test_a_foreign_process_on_the_chips_is_named_and_never_killed"),
    ("fault 15: busy check of a node made by hand", "devices of every generation", "providers/tpu_vm/test_startup_script.py::test_chips_that_somebody_uses_are_named_and_the_node_is_not_adopted"),
    ("fault 16: injection", "values are never executed", "providers/tpu_vm/test_startup_script.py::test_metadata_is_never_executed"),
    ("fault 16: passwords", "hashes of tokens", f"{AUTH}::test_the_hash_of_a_token_is_all_that_is_kept"),
    ("fault 16: pages without a login", "every route is closed", f"{AUTH}::test_every_route_is_closed_to_whoever_has_no_right_to_it"),
    ("fault 16: CSRF", "token of the page", "service/test_browser_sessions.py::test_a_change_needs_the_token_of_the_page"),
    ("fault 16: open redirect next=", "no address leads to another site", "service/test_page_addresses.py::test_no_address_leads_to_another_site"),
    ("fault 16: forgeable session", "signed cookie", "service/test_browser_sessions.py::test_a_cookie_lasts_a_week_and_cannot_be_changed"),
    ("fault 16: binds 0.0.0.0 without TLS", "must be allowed", "test_config.py::test_plain_http_beyond_loopback_must_be_allowed"),
    ("fault 16: any user acts as any other", "owner or admin", "service/test_ownership.py::test_only_the_owner_or_an_admin_changes_an_object"),
    ("fault 16: keys on command lines and in files", "sealed", "service/test_secrets.py::test_a_secret_is_an_encrypted_object_of_the_store"),
    ("fault 16: group-writable files", "only the server writes to its files", "service/test_file_modes.py::test_only_the_server_writes_to_the_code_logs_and_secrets_of_jobs"),
    ("fault 16: 777 on staging and logs", "only its user enters the folder of an attempt", "agent/test_running.py::test_only_its_user_enters_the_folder_of_an_attempt"),
    ("fault 16: delete without a question", "asks", f"{SERVER}::test_cancel_all_asks_and_cancels_only_your_live_jobs"),
)  # fmt: skip


def path_of(file: str) -> Path:
    return (MIGRATION if file.startswith("migration/") else TESTS) / file


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse(path_of(file).read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize(("item", "node"), [(item, node) for item, _, node in PARITY])
def test_the_test_of_each_line_exists(item, node):
    file, _, name = node.partition("::")
    assert name in names_in(file), f"{item}: no {node}"


def test_each_line_is_there_once():
    items = [item for item, _, _ in PARITY]
    assert len(items) == len(set(items))


def test_no_line_is_covered_by_its_spelling_alone():
    assert not [item for item, _, node in PARITY if node == NAMES]


def words(node: ast.AST) -> set[str]:
    """Every text in a test file: whole, and word by word."""
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    found = [text for text in texts if isinstance(text, str)]
    return {*found, *(word for text in found for word in text.split())}


def test_every_spelling_of_a_command_has_a_line_or_is_typed_in_a_test():
    """A spelling with an equivalent of today, or that equivalent, is typed in a test of what it
    does (another test checks that the one runs the other); one without is in a line above."""
    from tests.migration.test_former_names import SPELLINGS
    from tpufleet_migration.former_names import FORMER_NAMES, Renamed

    assert len(SPELLINGS) == len(set(SPELLINGS)) >= 126
    files = [path_of(FORMER), TESTS / "views/test_vm_shell.py", TESTS / "views/test_vm_fleet.py"]
    files += [
        path_of(f"migration/{name}.py") for name in ("test_former_nodes", "test_former_archive")
    ]
    files += [TESTS / "providers/tpu_vm/test_journeys.py", TESTS / SERVER, TESTS / ALONE]
    typed = set().union(*(words(ast.parse(file.read_text())) for file in files))
    listed = {word for item, _, _ in PARITY for word in re.split(r"[ ,:]+", item)}
    lines = {
        name: former.arguments
        for name, former in FORMER_NAMES.items()
        if isinstance(former, Renamed) and name in SPELLINGS
    }
    untyped = {name for name, line in lines.items() if name not in typed and not typed >= set(line)}
    assert not untyped, "no test types these"
    answered = set(SPELLINGS) & FORMER_NAMES.keys() - lines.keys()
    assert not answered - listed - typed, "no line names these"
