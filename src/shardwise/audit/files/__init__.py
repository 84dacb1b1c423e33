"""Recordings of other software as `Call`s: Flight Recorder dumps, Kineto traces, execution traces and Chakra graphs."""
