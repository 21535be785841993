"""Resumable jobs made of the floors below: retrain, registry, schedule.

May import everything but `loop`. Every run is a row with steps in the journal.
"""
