"""The paper's training data: build it into a folder and describe what was built."""
