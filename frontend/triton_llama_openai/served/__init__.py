"""The served models by name, each as its Triton describes it; a task asks for the description again."""
