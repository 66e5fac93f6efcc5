"""Partition a PyTorch program for one device across many: a checked, portable file that runs.

Each step is a function whose result can be printed and saved. `capture` makes an `IRGraph` of a
model, `compile_ir` one of a training step. `profile` measures it, `plan` assigns it to devices, and
`build` makes a `Pipeline`. `check` proves the rules of the file, and `verify` compares it with the
model's output. `run` and `Runner` run it; `train` trains a step. `compile` makes one plan of kernel
calls of a model or a step, and `lower` one of each task of a pipeline. `draw` draws a graph.

Imports are lazy: torch and other dependencies are imported on first use (`lazy`).
"""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily
from shardwright.version import __version__

if TYPE_CHECKING:
    from shardwright.building.build import build
    from shardwright.clusters import Cluster, DeviceModel
    from shardwright.codegenerate import SynchronousPipeline
    from shardwright.codegenerate.codegen import codegen
    from shardwright.compat.entry import (
        build_graph,
        compile_partitioned_model,
        compile_partitoned_model,
        partition_with_profiler,
        pipe_model,
    )
    from shardwright.compat.specified import CudaExecutor, compile_cuda, optimize_ir
    from shardwright.compiler import (
        CompiledProgram,
        Replaying,
        compile,
        lower,
        lower_graph,
    )
    from shardwright.costs import Analytic, Profile, TaskTimes
    from shardwright.engine import Timeline
    from shardwright.errors import (
        AnnotationError,
        CaptureError,
        CodegenError,
        DeviceError,
        DrawError,
        ExecError,
        GraphError,
        InputError,
        LaunchError,
        PipelineError,
        PlanError,
        ProfileError,
        RunError,
        ScheduleError,
        ShardwrightError,
        VerifyError,
        WeightError,
        WorkerError,
        WriteError,
    )
    from shardwright.ir import Builder, IRGraph, IRNode, IRValue
    from shardwright.ops import Dimop, infer_annotation, register_op
    from shardwright.pipeline import Bundle, Pipeline
    from shardwright.pipeline.check import check
    from shardwright.planner import plan
    from shardwright.planning import (
        METIS_partition,
        Partition,
        Plan,
        metis_partition,
        partition_by_memory,
        pipedream_partition,
        predict,
    )
    from shardwright.profiling import (
        profile,
        profile_cluster,
        profile_device,
        profile_links,
        profile_network,
    )
    from shardwright.reporting import Drawing, TimelineChart, draw
    from shardwright.runtime import Runner, Session, TrainingRunner, profile_tasks, run, verify
    from shardwright.simulation import simulate
    from shardwright.tracing import CaptureWarning, Model, capture, compile_ir, get_ir, is_tracing
    from shardwright.tracing.capture import empty_weights
    from shardwright.tracing.program_set import ProgramSet
    from shardwright.training import TrainResult, state_dict, train

__all__ = [
    "Analytic",
    "AnnotationError",
    "Builder",
    "Bundle",
    "CaptureError",
    "CaptureWarning",
    "Cluster",
    "CodegenError",
    "CompiledProgram",
    "CudaExecutor",
    "DeviceError",
    "DeviceModel",
    "Dimop",
    "DrawError",
    "Drawing",
    "ExecError",
    "GraphError",
    "IRGraph",
    "IRNode",
    "IRValue",
    "InputError",
    "LaunchError",
    "METIS_partition",
    "Model",
    "Partition",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ProgramSet",
    "Replaying",
    "RunError",
    "Runner",
    "ScheduleError",
    "Session",
    "ShardwrightError",
    "SynchronousPipeline",
    "TaskTimes",
    "Timeline",
    "TimelineChart",
    "TrainResult",
    "TrainingRunner",
    "VerifyError",
    "WeightError",
    "WorkerError",
    "WriteError",
    "__version__",
    "build",
    "build_graph",
    "capture",
    "check",
    "codegen",
    "compile",
    "compile_cuda",
    "compile_ir",
    "compile_partitioned_model",
    "compile_partitoned_model",
    "draw",
    "empty_weights",
    "get_ir",
    "infer_annotation",
    "is_tracing",
    "lower",
    "lower_graph",
    "metis_partition",
    "optimize_ir",
    "partition_by_memory",
    "partition_with_profiler",
    "pipe_model",
    "pipedream_partition",
    "plan",
    "predict",
    "profile",
    "profile_cluster",
    "profile_device",
    "profile_links",
    "profile_network",
    "profile_tasks",
    "register_op",
    "run",
    "simulate",
    "state_dict",
    "tracing",
    "train",
    "verify",
]

import_lazily(__name__)
