"""What a distributed program of any engine sends and holds, against what its layout must send and hold."""
