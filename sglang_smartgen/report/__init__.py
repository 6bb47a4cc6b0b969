"""What a person or a script gets to see: the demo, benchmarks, plots and the model they run."""
