"""AdminService: what the scheduler knows of its executors, for whoever operates them."""

from __future__ import annotations

from rorqual.v1 import admin_pb2, admin_pb2_grpc

from .engine import Engine
from .rpc_calls import Context


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Reads; changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListExecutors(
        self, request: admin_pb2.ListExecutorsRequest, context: Context
    ) -> admin_pb2.ListExecutorsResponse:
        return admin_pb2.ListExecutorsResponse(
            executors=[
                admin_pb2.ExecutorInfo(
                    executor_id=hello.executor_id,
                    device=hello.device,
                    model=hello.model,
                    cache_groups=hello.cache_groups,
                    memory=hello.memory,
                    max_num_seqs=hello.max_num_seqs,
                    max_num_batched_tokens=hello.max_num_batched_tokens,
                    num_running=state.num_running,
                    num_total_blocks=state.cache.num_blocks,
                    num_free_blocks=state.cache.num_free,
                    num_granted_unwritten_blocks=state.num_granted_unwritten,
                    group_free_blocks=[group.pool.num_free for group in state.cache.groups],
                )
                for hello, state in self._engine.executors()
            ]
        )
