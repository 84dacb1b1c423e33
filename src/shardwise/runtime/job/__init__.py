"""The processes of a run: started, met, watched, stopped and started again. What they compute is elsewhere."""
