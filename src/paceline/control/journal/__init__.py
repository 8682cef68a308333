"""The run's folder and its database, `run.db`: what is remembered, and what people look at."""
