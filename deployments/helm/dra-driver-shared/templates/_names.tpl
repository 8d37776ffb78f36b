{{- define "dra-driver-shared.labels" -}}
app.kubernetes.io/name: dra-driver-shared
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
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
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
    helm.sh/hook-output-log-policy: hook-failed
{{- end }}

{{- /* CEL: the request asks for more than zero groups, under either name of the capacity. Without a number, it does. */}}
{{- define "dra-driver-shared.asksForGroups" -}}
{{- $request := index . 0 -}}
["groups", {{ printf "%s/groups" (index . 1) | quote }}].all(name, !{{ $request }}.?capacity.?requests[?name].hasValue() || quantity(string({{ $request }}.?capacity.?requests[?name].value())).isGreaterThan(quantity("0")))
{{- end -}}

{{/* The references to Secrets with credentials for the image, from a list of names. */}}
{{- define "dra-driver-shared.pullSecrets" -}}
{{- range $i, $name := . }}
{{- if $i }}
{{ end -}}
- name: {{ $name }}
{{- end }}
{{- end }}

{{/*
The configuration of the driver. It is an annotation of the pods, and not a ConfigMap, so that each
revision has its own: while a rollout stops, because of a wrong configuration, the pods of the former revision restart
with the former configuration.
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
