// Numbers as people read them: the same rules as report/units.py, to which a test holds them.

const DECIMAL = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
const COUNT = ["", "k", "M", "B", "T", "P"];

export function bytes(n) {
  return scaled(n, DECIMAL, " ");
}

export function count(n) {
  return scaled(n, COUNT, "");
}

export function seconds(value) {
  if (value < 0) return "-" + seconds(-value);
  if (value < 59.95) {
    for (const [unit, size] of [["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3]]) {
      if (value > 0 && value < 999.5 * size) return `${digits(value / size)} ${unit}`;
    }
    return `${digits(value)} s`;
  }
  const whole = Math.round(value);
  const minutes = Math.floor(whole / 60), hours = Math.floor(whole / 3600), days = Math.floor(whole / 86400);
  const two = (n) => String(n).padStart(2, "0");
  if (hours < 1) return `${minutes} min ${two(whole % 60)} s`;
  if (days < 2) return `${hours} h ${two(minutes % 60)} min`;
  return `${days} d ${two(hours % 24)} h`;
}

export function share(fraction) {
  const percent = 100 * fraction, size = Math.abs(percent);
  if (percent === 0) return "0%";
  const sign = percent < 0 ? "-" : "";
  if (size < 0.01) return "<0.01%";
  return `${sign}${size < 999.5 ? digits(size) : size.toLocaleString("en-US", { maximumFractionDigits: 0 })}%`;
}

/** A number without a unit: whole ones with separators, others with four significant digits. */
export function plain(value) {
  if (!Number.isFinite(value)) return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

const BY_UNIT = { bytes, count, seconds, share };

/** A value of a column with this unit. */
export function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  return (BY_UNIT[unit] ?? plain)(value);
}

/** A mark on an axis: without zeros behind the point. */
export function mark(value, unit) {
  if (value === 0) return "0";
  if (unit === "seconds" && Math.abs(value) >= 60) return `${value.toLocaleString("en-US", { maximumFractionDigits: 0 })} s`;
  const [number, ...rest] = shown(value, unit).split(" ");
  const short = number.includes(".") ? number.replace(/\.?0+(%?)$/, "$1") : number;
  return [short, ...rest].join(" ");
}

function scaled(n, units, gap) {
  let size = Math.abs(n), index = 0;
  while (size >= 1000 - (index ? 0.5 : 0) && index < units.length - 1) {
    size /= 1000;
    index += 1;
  }
  const number = index || size !== Math.trunc(size) ? digits(size) : String(Math.trunc(size));
  return `${n < 0 ? "-" : ""}${number}${gap}${units[index]}`.trimEnd();
}

function digits(size) {
  return size.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}
