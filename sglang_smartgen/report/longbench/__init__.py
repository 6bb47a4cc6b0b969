"""LongBench v1 against SmartGen and stock SGLang: tasks, data, prompts, metrics, runs, scores."""
