"""Every kind of fault that people met in public, and the tests that it has, by file and name."""

BUILD, BOUNDARY, KV, DRIFT = (f"cache/test_{name}.py::test_" for name in ("build", "boundary", "kv", "drift"))
CONFIG, LOAD = (f"minimodel/test_{name}.py::test_" for name in ("config", "load"))
CHECKPOINT, SHARDS = "minimodel/test_checkpoint.py::test_", "minimodel/test_checkpoint_shards.py::test_"
ROLES, ATTENTION = (f"minimodel/test_{name}.py::test_" for name in ("roles", "attention"))
DECODER, PADDING = "minimodel/test_decoder.py::test_", "minimodel/test_decoder_padding.py::test_"
SAFETENSORS, NUMERICS = "minimodel/test_safetensors_file.py::test_", "minimodel/test_numerics.py::test_"
GREEDY, LEDGER, PREPARE = (
    "decode/test_greedy.py::test_",
    "experiments/run/test_ledger.py::test_",
    "experiments/test_prepare.py::test_",
)
INTERVALS, SCORING = "stats/test_intervals.py::test_", "stats/answers/test_score.py::test_"
SAMENESS, DISK, STATED = (f"faults/test_{name}.py::test_" for name in ("sameness", "disk", "stated"))

CASES: dict[int, tuple[str, list[str]]] = {
    1: (
        "construction changes bits",
        [
            BUILD + "prefill_against_incremental_is_a_measurement",
            BUILD + "the_same_construction_twice_is_the_same_bits_in_other_memory",
        ],
    ),
    2: (
        "environment changes bits",
        [
            NUMERICS + "a_changed_setting_is_missed_and_then_put_right",
            NUMERICS + "bits_survive_a_callers_settings",
            NUMERICS + "record_holds_names_and_settings_as_they_are",
            SAMENESS + "another_thread_count_is_refused_on_resume",
        ],
    ),
    3: ("ties", [GREEDY + "ties_go_to_the_lowest_id"]),
    4: (
        "masked rows",
        [
            PADDING + "padding_leaves_no_nan_and_does_not_reach_valid_rows",
            ATTENTION + "dead_rows_are_zeros_and_nothing_they_see_matters",
            ROLES + "a_visibility_table_with_a_zero_on_its_diagonal_is_refused",
        ],
    ),
    5: (
        "mask meaning",
        [DECODER + "a_mask_that_is_not_bool_is_refused", ROLES + "masks_of_another_dtype_are_refused_by_name"],
    ),
    6: (
        "left padding",
        [
            ROLES + "positions_of_a_left_padded_row_count_its_own_tokens",
            PADDING + "the_first_valid_key_of_a_left_padded_row_stands_at_position_zero",
        ],
    ),
    7: (
        "grouped heads",
        [
            ATTENTION + "fourteen_query_heads_over_two",
            CONFIG + "fourteen_heads_over_four_are_refused_and_over_two_are_not",
        ],
    ),
    8: (
        "RoPE base",
        [
            CONFIG + "rope_base_is_read_in_both_spellings",
            CONFIG + "rope_bases_that_disagree_are_refused_by_their_keys",
            CONFIG + "missing_rope_base_is_refused_by_both_keys",
            CONFIG + "scaled_rope_is_refused_by_its_key",
        ],
    ),
    9: (
        "window flags",
        [
            CONFIG + "window_number_without_a_sliding_layer_changes_nothing",
            CONFIG + "sliding_layers_are_refused",
            LOAD + "the_window_number_alone_does_not_move_a_bit",
        ],
    ),
    10: (
        "output head",
        [
            CHECKPOINT + "tied_with_another_head_in_the_file_keeps_it_with_a_warning",
            CHECKPOINT + "untied_without_a_head_is_refused",
            LOAD + "tied_and_untied_heads",
            STATED + "the_warning_about_a_head_beside_a_tied_flag_is_in_the_manifest",
        ],
    ),
    11: (
        "shard index",
        [
            SHARDS + "index_entries_that_are_no_plain_file_names_are_refused",
            SHARDS + "an_index_entry_that_is_a_link_leading_outside_is_refused",
            SHARDS + "a_missing_shard_is_refused",
        ],
    ),
    12: (
        "damaged bytes",
        [
            SAFETENSORS + "damaged_files_are_refused_with_their_name",
            SAFETENSORS + "no_cut_and_no_junk_passes_for_a_whole_file",
            LOAD + "a_damaged_weights_file_gives_no_model",
        ],
    ),
    13: ("typed delimiters", ["decode/test_text.py::test_typed_delimiters_are_ordinary_text"]),
    14: (
        "padded vocabulary",
        [
            GREEDY + "the_padded_vocabulary_is_never_chosen",
            GREEDY + "a_model_whose_padded_rows_are_the_best_never_says_them",
            "decode/test_contract.py::test_ids_beyond_the_tokenizer_are_never_ordinary",
        ],
    ),
    15: (
        "cache mutated by use",
        [BOUNDARY + "continuations_leave_the_boundary_alone_and_do_not_depend_on_their_order"],
    ),
    16: (
        "cache API across versions",
        [
            "hf/test_versions.py::test_both_cache_interfaces_are_read",
            "hf/test_versions.py::test_another_cache_interface_is_refused_with_the_version",
        ],
    ),
    17: (
        "NaN",
        [
            DRIFT + "the_same_nan_is_exact_without_numbers",
            KV + "a_value_that_is_not_finite_fails_the_row_and_is_named",
            GREEDY + "logits_that_are_not_finite_fail_the_row",
            LOAD + "a_weight_that_is_not_finite_is_refused_by_name",
        ],
    ),
    18: ("answer letters", [SCORING + "corpus", STATED + "the_stated_answers"]),
    19: ("numbers", [SCORING + "corpus", STATED + "the_stated_answers"]),
    20: ("boxes", [SCORING + "last_box_is_what_a_plain_search_finds", STATED + "the_stated_answers"]),
    21: ("no discordant pair", [INTERVALS + "mcnemar", STATED + "mcnemar_of_the_stated_pairs"]),
    22: (
        "Wilson at the ends",
        [INTERVALS + "wilson_at_the_ends", INTERVALS + "wilson_without_data_and_with_impossible_counts"],
    ),
    23: (
        "constant data",
        [
            INTERVALS + "bootstrap_of_constant_and_of_little_data",
            INTERVALS + "bootstrap_refuses_what_is_not_finite_or_not_a_list",
        ],
    ),
    24: (
        "torn ledger",
        [
            LEDGER + "every_torn_tail_is_dropped_and_complete_rows_keep_their_bytes",
            LEDGER + "a_tail_cut_inside_a_multibyte_character_is_a_torn_tail",
            LEDGER + "one_flipped_byte_in_a_complete_line_is_named_and_refused",
            DISK + "torn_lines_of_both_ledgers_are_dropped_and_redone",
        ],
    ),
    25: (
        "two writers",
        [
            "experiments/run/test_directory.py::test_a_second_writer_is_refused_until_the_first_lets_go",
            DISK + "a_second_process_is_refused_while_the_first_lives_and_not_after_its_death",
        ],
    ),
    26: (
        "choices",
        [PREPARE + "a_csv_with_a_mark_and_quoted_line_breaks", PREPARE + "no_other_row_and_no_order_moves_a_letter"],
    ),
}
