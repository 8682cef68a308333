"""What a death costs a group; `ulfm_worker` is a rank of Open MPI beside it."""
