"""What of PyTorch's suite is not run on Paceline, one by one with the reason; what is run beyond Gloo's part of it; and
the selection for every test run."""

from __future__ import annotations

_REFUSED = "torch.distributed.monitored_barrier refuses every backend that is not called gloo"

EXCLUDED: dict[str, str] = {
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": "asks for the text of Gloo's own error in its monitoredBarrier",
}

# CPU tests that the suite itself leaves to MPI.
ALL_TO_ALL = [
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
    "test_all_to_all_single_equal_split",
    "test_all_to_all_single_equal_split_complex",
    "test_all_to_all_single_equal_split_full_group",
    "test_all_to_all_single_equal_split_group",
    "test_all_to_all_single_unequal_split",
    "test_all_to_all_single_unequal_split_complex",
    "test_all_to_all_single_unequal_split_full_group",
    "test_all_to_all_single_unequal_split_group",
]

# Their bodies do nothing for a backend whose name they do not know.
ASK_FOR_GLOO_BY_NAME = {
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
}

# For every test run, by world size: one of each kind with two processes, what depends on more with four.
QUICK = {
    2: {
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_DistributedDataParallel_requires_grad",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_all_gather",
        "test_all_gather_coalesced_complex",
        "test_all_gather_coalesced_simple",
        "test_all_gather_coalesced_with_empty",
        "test_all_gather_complex",
        "test_all_gather_object_default_pg",
        "test_all_gather_object_subgroup",
        "test_all_reduce_coalesced_max",
        "test_all_reduce_coalesced_max_complex_unsupported",
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_complex_unsupported_ops",
        "test_all_reduce_max",
        "test_all_reduce_sum",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_complex",
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_single_equal_split",
        "test_all_to_all_single_equal_split_complex",
        "test_all_to_all_single_unequal_split",
        "test_all_to_all_single_unequal_split_complex",
        "test_batch_isend_irecv_gloo",
        "test_batch_isend_irecv_gloo_tags",
        "test_broadcast",
        "test_ddp_create_graph",
        "test_ddp_logging_data_cpu",
        "test_destroy_group",
        "test_gather",
        "test_gather_checks",
        "test_get_backend",
        "test_get_future",
        "test_get_rank",
        "test_get_rank_size_group",
        "test_grads_same_across_ranks_with_no_sync",
        "test_irecv",
        "test_isend",
        "test_reduce_max",
        "test_reduce_sum",
        "test_scatter",
        "test_scatter_checks",
        "test_scatter_complex",
        "test_scatter_object_list",
        "test_send_recv",
        "test_send_recv_any_source",
        "test_send_recv_with_tag",
        "test_sparse_all_reduce_sum",
        "test_static_graph_api_cpu",
    },
    4: {
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_all_gather_coalesced_simple",
        "test_all_gather_object_subgroup",
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_sum_async",
        "test_all_to_all",
        "test_all_to_all_single_unequal_split",
        "test_batch_isend_irecv_gloo_tags",
        "test_broadcast_full_group",
        "test_destroy_group",
        "test_gather_object_subgroup",
        "test_new_subgroups_with_group_param",
        "test_reduce_full_group_max",
        "test_scatter_object_list",
        "test_send_recv_any_source",
        "test_sparse_all_reduce_sum",
    },
}
