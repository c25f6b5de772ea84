"""The processes of a run: joining them, collectives, the watchdog, DeepSpeed's configuration and engines."""
