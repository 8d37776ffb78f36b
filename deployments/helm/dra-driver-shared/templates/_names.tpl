{{/*
The labels of all objects, as YAML. Because all objects use them, this template also fails on a release name that would
produce invalid names: the uninstall check's Job name can have at most 63 characters, and the API server would refuse a
longer name only during helm uninstall. A Service's name must start with a letter and must not contain dots.
*/}}
{{- define "dra-driver-shared.labels" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release name %s: must be at most 47 characters, start with a letter, and have no dots, because the names of Services and Jobs begin with it" .Release.Name) -}}
{{- end -}}
{{- $labels := dict
  "app.kubernetes.io/name" "dra-driver-shared"
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service -}}
{{- toYaml (merge $labels (.Values.commonLabels | default dict)) -}}
{{- end -}}

{{/*
A pod's labels, from the root, its component, and its own labels. Selectors use only three of them, because the
selectors of a DaemonSet and a Deployment cannot change.
*/}}
{{- define "dra-driver-shared.podLabels" -}}
{{- $root := index . 0 -}}
{{- $labels := dict "app.kubernetes.io/component" (index . 1) -}}
{{- $common := include "dra-driver-shared.labels" $root | fromYaml -}}
{{- toYaml (merge $labels (pick $common "app.kubernetes.io/name" "app.kubernetes.io/instance") (index . 2 | default dict) $common) -}}
{{- end -}}

{{/* A pod's nodes: the image contains only Linux programs. */}}
{{- define "dra-driver-shared.nodeSelector" -}}
{{- toYaml (merge (dict "kubernetes.io/os" "linux") (. | default dict)) -}}
{{- end -}}

{{- define "dra-driver-shared.pluginSelector" -}}
app.kubernetes.io/name: dra-driver-shared
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: plugin
{{- end -}}

{{- define "dra-driver-shared.controllerSelector" -}}
app.kubernetes.io/name: dra-driver-shared
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end -}}

{{- define "dra-driver-shared.preDelete" }}
  annotations:
    helm.sh/hook: pre-delete
    helm.sh/hook-weight: {{ . | quote }}
    # A failed Job stays until the next attempt, to keep its message readable.
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    helm.sh/hook-output-log-policy: hook-failed
{{- end }}

{{- /* CEL: the request asks for more than zero groups, under either of the capacity's names, or without a number. */}}
{{- define "dra-driver-shared.asksForGroups" -}}
{{- $request := index . 0 -}}
["groups", {{ printf "%s/groups" (index . 1) | quote }}].all(name, !{{ $request }}.?capacity.?requests[?name].hasValue() || quantity(string({{ $request }}.?capacity.?requests[?name].value())).isGreaterThan(quantity("0")))
{{- end -}}

{{/* References to Secrets with image credentials, from a list of names. */}}
{{- define "dra-driver-shared.pullSecrets" -}}
{{- range $i, $name := . }}
{{- if $i }}
{{ end -}}
- name: {{ $name }}
{{- end }}
{{- end }}

{{/*
The driver's configuration. It is an annotation of the pods, and not a ConfigMap, because each revision then has its own
configuration. If a wrong configuration stops a rollout, the previous revision's pods restart with the previous
configuration.
*/}}
{{- define "dra-driver-shared.configAnnotation" -}}
dra-shared.dev/config: |
  apiVersion: config.dra-shared.dev/v1alpha1
  kind: DriverConfig
  {{- toYaml .Values.config | nindent 2 }}
{{- end }}

{{- define "dra-driver-shared.configVolume" -}}
name: config
downwardAPI:
  items:
  - {path: config.yaml, fieldRef: {fieldPath: "metadata.annotations['dra-shared.dev/config']"}}
{{- end }}
