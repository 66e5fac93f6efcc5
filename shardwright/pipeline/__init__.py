"""The pipeline file: its types, its rules, its weights, and the object that holds them."""

from shardwright.pipeline.bundle import Bundle
from shardwright.pipeline.check import check
from shardwright.pipeline.paramfiles import find_weights, open_paramfile, write_paramfile
from shardwright.pipeline.pipeline import Origin, Pipeline
from shardwright.pipeline.schema import (
    Device,
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    Microbatches,
    ParamValue,
    Phase,
    ScheduleInfo,
    StateOrigin,
    Structure,
    SuperTask,
    TensorInfo,
    Training,
    json_schema,
    json_schema_text,
)
from shardwright.pipeline.weights import Weights

__all__ = [
    "Bundle",
    "Device",
    "Document",
    "Metadata",
    "MetadataTensor",
    "MetadataTensorSlice",
    "MetadataTensorSlices",
    "MetadataTensors",
    "Microbatches",
    "Origin",
    "ParamValue",
    "Phase",
    "Pipeline",
    "ScheduleInfo",
    "StateOrigin",
    "Structure",
    "SuperTask",
    "TensorInfo",
    "Training",
    "Weights",
    "check",
    "find_weights",
    "json_schema",
    "json_schema_text",
    "open_paramfile",
    "write_paramfile",
]
