"""Adapters of engines, a file each: functions and constants that `certify.adapter.Adapter` names."""
