// Numbers as a person reads them: bytes in powers of 1,024, tokens with separators, times in one unit.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NUMBER = new Intl.NumberFormat("en");

export const count = (number) => NUMBER.format(number);

export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

export function bytes(number) {
  const unit = number < 1 ? 0 : Math.min(Math.floor(Math.log2(number) / 10), UNITS.length - 1);
  const value = number / 1024 ** unit;
  return `${value.toLocaleString("en", { maximumFractionDigits: unit && value < 100 ? 1 : 0 })} ${UNITS[unit]}`;
}

export function seconds(number) {
  if (number < 1) return `${Math.max(Math.round(number * 1000), 0)} ms`;
  if (number < 60) return `${Math.round(number)} s`;
  if (number < 3600) return `${Math.round(number / 60)} min`;
  if (number < 172800) return `${Math.round(number / 3600)} h`;
  return `${Math.round(number / 86400)} days`;
}

export const ago = (age_s) => (age_s < 1 ? "just now" : `${seconds(age_s)} ago`);

export function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "under 1 %" : `${Math.floor(share)} %`;
}

export const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString("en-GB");

export const TIERS = { hot: "memory", cold: "SSD", both: "memory and SSD" };
