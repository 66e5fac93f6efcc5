"""From a plan or a pipeline file to the stages that code is written from."""
